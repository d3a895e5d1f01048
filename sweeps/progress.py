"""What is going on, for a person: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from harness.outcome import TRAINED
from sweeps.planner import PackPlan
from sweeps.run import PROGRESS, Elsewhere, Failed, Finished

PLAIN_SECONDS = 10.0  # between lines where there is no terminal


class Display:
    """Follows a sweep. Counts finished packs as they are told, running ones from their progress files."""

    def __init__(self, packs: Sequence[PackPlan], out: Path, console: Console):
        self.out, self.console = out, console
        self.packs = {pack.id: pack for pack in packs}
        self.total = sum(len(pack.recorded) for pack in packs)
        self.total_steps = sum(len(pack.trials) * pack.trials[0].steps for pack in packs)
        self.done_trials = self.bad_trials = self.failed_packs = 0
        self.done_steps, self.skipped_steps = 0, 0
        self.started = self.last_line = time.monotonic()
        self._resumed: dict[str, int] = {}  # pack -> trial-steps
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("trial-steps"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self._task = self._bar.add_task("starting", total=self.total_steps)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def finished(self, result: Finished | Failed | Elsewhere) -> None:
        """A pack has ended, well or badly, or is left to another process."""
        pack = self.packs.pop(result.pack)
        if isinstance(result, Elsewhere):
            self.skipped_steps += len(pack.trials) * pack.trials[0].steps
        elif isinstance(result, Failed):
            self.failed_packs += 1
            self.skipped_steps += len(pack.trials) * pack.trials[0].steps
            self.console.print(f"pack {result.pack} failed: {result.reason}", highlight=False, markup=False)
        else:
            self.done_trials += len(result.outcome)
            self.bad_trials += sum(outcome != TRAINED for outcome in result.outcome)
            self.done_steps += len(pack.trials) * pack.trials[0].steps
        self.update()

    def update(self) -> None:
        """Look at the progress files and redraw."""
        running, frozen = 0, 0
        for values in _read(self.out, self.packs):
            running += values["steps"] * values["trials"]
            self._resumed[values["pack"]] = values["begun"] * values["trials"]
            frozen += values["frozen"]
        steps = self.done_steps + running
        elapsed = time.monotonic() - self.started
        # What earlier commands trained, up to the checkpoints from which packs go on, was not trained in this time.
        rate = (steps - sum(self._resumed.values())) / elapsed if elapsed > 0 else 0.0
        words = (
            f"{self.done_trials}/{self.total} trials, {self.bad_trials + frozen} diverged, {rate:,.0f} trial-steps/s"
        )
        if self._bar:
            self._bar.update(self._task, completed=steps + self.skipped_steps, description=words)
        elif time.monotonic() - self.last_line > PLAIN_SECONDS:
            self.last_line = time.monotonic()
            left = f"{(self.total_steps - self.skipped_steps - steps) / rate:,.0f} s left" if rate else "waiting"
            self.console.print(f"{words}, {left}", highlight=False)


def _read(out: Path, packs: Sequence[str] | dict) -> list[dict]:
    found = []
    for file in (out / PROGRESS).glob("*.json"):
        if file.stem in packs:
            try:
                found.append(json.loads(file.read_text()) | {"pack": file.stem})
            except (OSError, ValueError):
                continue  # it was just replaced or removed: the next look will see it
    return found
