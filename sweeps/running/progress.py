"""What is going on, for a person: a live bar on a terminal, plain lines elsewhere; and what came of it, in words.

One worker trains in the process of the command itself, so a thread looks at the progress files and redraws.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from harness.basics.printing import count, duration
from harness.objectives.outcome import DIVERGENT, NON_FINITE
from harness.storage.progress_files import PROGRESS, PackProgress, read_progress
from sweeps.compose.settings import RunSettings
from sweeps.planning.packs import PackPlan, Plan
from sweeps.running.job import Elsewhere, Ended, Failed, Finished

FIRST_SECONDS = 2.0  # before the first line where there is no terminal: short sweeps need none
PLAIN_SECONDS = 10.0  # between two of them
REDRAW_SECONDS = 0.5


class Display:
    """Follows a sweep. Counts finished packs as they are told, running ones from their progress files."""

    def __init__(self, packs: Sequence[PackPlan], out: Path, console: Console):
        self.out, self.console = out, console
        self.packs = {pack.id: pack for pack in packs}
        self.total = sum(len(pack.recorded) for pack in packs)
        self.total_steps = sum(len(pack.trials) * pack.trials[0].steps for pack in packs)
        self.done_trials = self.diverged = self.done_steps = self.skipped_steps = 0
        self.started = time.monotonic()
        self._next_line = self.started + FIRST_SECONDS
        self._resumed: dict[str, int] = {}  # pack -> trial-steps
        self._seen: dict[str, PackProgress] = {}
        self._damaged: set[str] = set()  # packs whose progress file was said to be damaged
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="display", daemon=True)

    def __enter__(self) -> Display:
        # In a notebook rich redraws with ipywidgets, and warns where they are missing.
        has_widgets = self.console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if (self.console.is_terminal or has_widgets) and self.packs:
            columns = ("{task.percentage:3.0f}%", "{task.fields[left]}", "{task.description}")
            texts = (TextColumn(column, markup=False) for column in columns)
            self._bar = Progress(BarColumn(20), *texts, console=self.console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(f"{self.total} trials", total=self.total_steps, left="starting")
            self._bar.start()
        if self.packs:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bar:
            self._bar.stop()

    def _redraw(self) -> None:
        """Until the sweep ends, or nobody can be shown anything: the command itself will come upon that, too."""
        while not self._ended.wait(REDRAW_SECONDS):
            try:
                self.update()
            except (OSError, ValueError):
                return

    def finished(self, result: Ended) -> None:
        """A pack has ended, well or badly, or is left to another process."""
        with self._lock:
            pack = self.packs.pop(result.pack)
            self._seen.pop(result.pack, None)
            steps = len(pack.trials) * pack.trials[0].steps
            if isinstance(result, Finished):
                self.done_trials += len(result.outcome)
                self.diverged += sum(outcome in (DIVERGENT, NON_FINITE) for outcome in result.outcome)
                self.done_steps += steps
            else:
                self.skipped_steps += steps
            if isinstance(result, Failed):
                self.console.print(f"pack {result.pack} failed: {result.reason}", soft_wrap=True)
            self.update()

    def update(self) -> None:
        """Look at the progress files; redraw the bar, or print a line if it is time for one."""
        with self._lock:
            seen, damaged = read_progress(self.out / PROGRESS)
            for pack in (damaged.keys() & self.packs.keys()) - self._damaged:
                self._damaged.add(pack)
                self.console.print(f"left out: {damaged[pack]}", soft_wrap=True)
            # A pack whose file is gone is done, and will be told in a moment: it stays seen until then.
            self._seen |= {pack: values for pack, values in seen.items() if pack in self.packs}
            steps, text, left = self._how_far()
            if self._bar:
                done = steps + self.skipped_steps
                self._bar.update(self._task, completed=done, description=text, left=left, refresh=True)
            elif time.monotonic() >= self._next_line:
                self._next_line = time.monotonic() + PLAIN_SECONDS
                self.console.print(f"{text}, {left}", soft_wrap=True)

    def _how_far(self) -> tuple[int, str, str]:
        """The trial-steps that are done, how far the sweep is, and how long it is going to take."""
        running = self._seen.values()
        steps = self.done_steps + sum(progress.steps * progress.trials for progress in running)
        self._resumed |= {pack: progress.begun * progress.trials for pack, progress in self._seen.items()}
        diverged = self.diverged + sum(progress.frozen for progress in running)
        # What earlier commands trained, up to the checkpoints from which packs go on, was not trained in this time.
        trained = steps - sum(self._resumed.values())
        text = f"{self.done_trials}/{self.total} trials, {diverged} diverged"
        if trained <= 0:
            return steps, text, "starting" if running else "waiting"
        rate = trained / max(time.monotonic() - self.started, 1e-9)
        left = (self.total_steps - self.skipped_steps - steps) / rate
        return steps, f"{text}, {rate:,.0f} trial-steps/s", f"about {duration(left)} left"


def summarize(
    plan: Plan, run: RunSettings, results: Sequence[Ended], console: Console, is_idle: bool, name: str = ""
) -> None:
    """What came of it; each failed pack with the place of its trace.

    `is_idle`: there was nothing to train or to wait for. `name` is that of one round of many: the folder is left out.
    """
    failed = [result for result in results if isinstance(result, Failed)]
    finished = [result for result in results if isinstance(result, Finished)]
    outcomes = Counter(outcome for result in finished for outcome in result.outcome)
    endings = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    line = f"trained {outcomes.total()} of {count(plan.trials, 'trial')}" + (f": {endings}" if endings else "")
    if is_idle:
        all_of_it = f"all {plan.complete} trials are" if plan.complete > 1 else "the trial is"
        line = f"nothing to train: {all_of_it} complete already"
    console.print(f"{name}: {line}" if name else line, soft_wrap=True)
    if idle := sum(result.idle_faults for result in finished):
        console.print(f"{count(idle, 'fault')} never fired, or wrote the value that was there", soft_wrap=True)
    if others := sum(isinstance(result, Elsewhere) for result in results):
        line = f"{count(others, 'pack')} left to another process, which trains them; the same command looks again"
        console.print(line, soft_wrap=True)
    for failure in failed:
        console.print(f"pack {failure.pack} failed: {failure.message}", soft_wrap=True)
    if not name:
        console.print(f"results in {run.out}", soft_wrap=True)
