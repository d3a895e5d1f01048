"""Run a sweep: check everything, plan, train or submit, and say what came of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from pebble import ProcessPool
from rich.console import Console

from harness.config import ConfigError, Data, Model, Problems, Trial
from harness.corpus import check_data
from harness.precision import pick_device
from harness.store import complete_trials, open_store, read_packs
from sweeps.planner import PackPlan, Plan, make_plan, trial_bytes, wall_seconds
from sweeps.progress import Display
from sweeps.run import PROGRESS, Failed, Finished, Job, corpus_of, record_failure, train_pack_safely, without_order
from sweeps.settings import Run

POLL_SECONDS = 0.5
Results = Generator[Finished | Failed | None]


class Executor(Protocol):
    """Trains packs somewhere."""

    @property
    def workers(self) -> int:
        """Packs that run at the same time."""
        ...

    @property
    def splits_over(self) -> int:
        """How many workers are worth cutting packs smaller for, so that none is idle."""
        ...

    def running(self, out: Path) -> list[Job]:
        """The packs that an earlier call has started and that still go on."""
        ...

    def __call__(self, jobs: Sequence[Job], running: Sequence[Job]) -> Results:
        """Train `jobs`. Yield what became of each of them and of `running`, and None while there is nothing to tell."""
        ...


def available_cores() -> int:
    """Cores that this process may use; fewer than the machine's inside a Slurm job or a container."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class LocalExecutor:
    """Trains packs on this machine, in `workers` processes; one worker is this process itself."""

    workers: int

    @property
    def splits_over(self) -> int:
        return self.workers

    def running(self, out: Path) -> list[Job]:
        return []

    def __call__(self, jobs: Sequence[Job], running: Sequence[Job]) -> Results:
        workers = min(self.workers, len(jobs))
        threads = max(1, available_cores() // max(1, workers))
        if workers <= 1:
            torch.set_num_threads(threads)
            for job in jobs:
                yield train_pack_safely(job)
            return
        # forkserver: torch is imported once, in a process that has never started a thread or touched CUDA.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sweeps.run"])
        pool = ProcessPool(workers, context=context, initializer=_start_worker, initargs=(threads,))
        try:
            with _signals_wait():
                pending: dict[Future, Job] = {pool.schedule(train_pack_safely, args=(job,)): job for job in jobs}
            while pending:
                done, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                yield None
                for future in done:
                    job = pending.pop(future)
                    try:
                        yield future.result()
                    except Exception as error:  # the worker itself died: killed, out of memory
                        yield record_failure(job, f"worker died: {error}", f"{type(error).__name__}: {error}")
        finally:
            pool.stop()
            pool.join()


@contextlib.contextmanager
def _signals_wait() -> Generator[None]:
    """Hold back Ctrl-C and SIGTERM, which would leave workers half started, until the end of the block.

    Processes that start in it never hear of Ctrl-C: it reaches the whole group, and the parent alone decides.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    resource_tracker.ensure_running()  # unblocks signals when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for this thread's children; other threads still hear it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _start_worker(threads: int) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(threads)


def _die_with_parent() -> None:
    """A killed sweep leaves no worker behind that trains on unseen."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Generator[None]:
    """SIGTERM ends the sweep as Ctrl-C does; only the exit status differs."""

    def stop(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def run_sweep(trials: Sequence[Trial], run: Run, executor: Executor, console: Console) -> int:
    """Check, plan and train. Returns the exit status: 0, 1 if a pack failed, 130 after Ctrl-C, 143 after SIGTERM.

    Raises ConfigError before anything is written if something about the run is wrong.
    """
    has_results = (run.out / "store.zarr" / "zarr.json").exists()
    problems = Problems()
    for precision in {trial.train.precision for trial in trials}:
        with problems.collect():
            device = pick_device(run.device, precision).type
    for data, context in _corpora(trials):
        with problems.collect():
            check_data(data, context)
    if has_results:
        with problems.collect():
            open_store(run.out, run.study)  # checks it, and changes nothing
    problems.check()
    complete = complete_trials(run.out) if has_results else set()
    running = executor.running(run.out)
    taken = {trial.id for job in running for trial in job.pack.recorded}
    plan = make_plan(trials, complete | taken, run.pack_size, device, executor.splits_over)
    if run.plan:
        print_plan(plan, device, executor.workers, console)
        return 0
    check_corpora(trials, run, has_results)
    open_store(run.out, run.study)
    _remove_stale_progress(run.out, {job.pack.id for job in running})
    _say_what_is_planned(plan, run, console)
    jobs = [Job(pack, run.out, run.device, run.block) for pack in plan.packs]
    results: list[Finished | Failed] = []
    stopped: KeyboardInterrupt | None = None
    with (
        _stopped_by_sigterm(),
        Display([*plan.packs, *(job.pack for job in running)], run.out, console) as display,
        contextlib.closing(executor(jobs, running)) as stream,
    ):
        try:
            for result in stream:
                if result is None:
                    display.update()
                else:
                    results.append(result)
                    display.finished(result)
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
    if not run.wait and not results and not stopped and (jobs or running):
        words = f"{len(jobs)} packs submitted, {len(running)} were in the queue already"
        console.print(f"{words}; the same command picks up what has finished", highlight=False, soft_wrap=True)
        return 0
    return summarize(plan, run, results, stopped, console)


def _remove_stale_progress(out: Path, running: Set[str]) -> None:
    """What a killed sweep has left of packs that do not run any more."""
    for file in (out / PROGRESS).glob("*"):
        if file.stem not in running:
            file.unlink(missing_ok=True)


def _corpora(trials: Sequence[Trial]) -> set[tuple[Data, int]]:
    """What is to be read, and the longest window of it."""
    longest: dict[Data, int] = {}
    for data, context in {(trial.data, trial.model.context) for trial in trials}:
        longest[without_order(data)] = max(context, longest.get(without_order(data), 0))
    return set(longest.items())


def check_corpora(trials: Sequence[Trial], run: Run, has_results: bool) -> None:
    """Refuse to mix results from different texts: the store's must be the one that this run would train on."""
    stored: dict[Data, str] = {}
    for pack in read_packs(run.out) if has_results else ():
        if pack.complete:
            data = without_order(Data(**pack.attributes["trials"][0]["data"]))
            stored[data] = pack.attributes["corpus"]["fingerprint"]
    for data, context in _corpora(trials):
        now = corpus_of(data, context).fingerprint
        before = stored.get(data, now)
        if now != before:
            raise ConfigError(
                f"out={run.out}: its results come from another text (fingerprint {before}, now {now}, "
                f"data.source={data.source}); allowed: a new folder"
            )


def print_plan(plan: Plan, device: str, workers: int, console: Console) -> None:
    """The trials, the packs by shape, memory and time."""
    _say_counts(plan, console)
    shapes: dict[tuple, list[PackPlan]] = {}
    for pack in plan.packs:
        shapes.setdefault(pack.trials[0].structure, []).append(pack)
    for packs in shapes.values():
        trial = packs[0].trials[0]
        model, train = trial.model, trial.train
        sizes = sorted({len(pack.trials) for pack in packs})
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        changed = [
            f"{k} {v}" for k, v in vars(model).items() if v != getattr(Model(), k) and k not in ("width", "depth")
        ]
        console.print(
            f"  width {model.width}, depth {model.depth}{''.join(f', {words}' for words in changed)}: "
            f"{len(packs)} packs of {span} trials, batch {train.batch} x {model.context} tokens, {train.steps} steps, "
            f"{sizes[-1] * trial_bytes(trial) / 2**20:,.0f} MiB a pack",
            highlight=False,
            soft_wrap=True,
        )
    seconds = wall_seconds(plan, device, workers)
    console.print(f"about {_duration(seconds)} with {workers} workers on {device} (rough)", highlight=False)


def _say_counts(plan: Plan, console: Console) -> None:
    words = f"{plan.asked} trials asked for, {plan.added_twins} golden twins added, {plan.complete} complete already: "
    console.print(f"{words}{plan.trials} to train in {len(plan.packs)} packs", highlight=False, soft_wrap=True)


def _say_what_is_planned(plan: Plan, run: Run, console: Console) -> None:
    console.print(f"study {run.study} -> {run.out}", highlight=False, soft_wrap=True)
    _say_counts(plan, console)


def summarize(
    plan: Plan, run: Run, results: Sequence[Finished | Failed], stopped: KeyboardInterrupt | None, console: Console
) -> int:
    """Say what came of it, and return the exit status."""
    outcomes: dict[str, int] = {}
    idle, failed = 0, []
    for result in results:
        if isinstance(result, Failed):
            failed.append(result)
        else:
            idle += result.idle_faults
            for outcome in result.outcome:
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "none"
    console.print(f"trained {sum(outcomes.values())} of {plan.trials} trials: {words}", highlight=False)
    if idle:
        console.print(f"{idle} faults never fired, or wrote the value that was there", highlight=False)
    for failure in failed:
        line = f"pack {failure.pack} failed: {failure.reason}; trace in {failure.trace}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"results in {run.out}", highlight=False, soft_wrap=True)
    if stopped:
        console.print("interrupted; the same command goes on from here", highlight=False)
        return 143 if isinstance(stopped, Terminated) else 130
    return 1 if failed else 0


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
