"""Packs in processes on this machine."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from pebble import ProcessPool

from harness.basics.memory import in_units, main_memory
from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.checkpoint import Stopped
from harness.storage.results_folder import FolderLost
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import pack_bytes, snapshot_bytes
from sweeps.running.job import Ended, Job, record_failure, train_pack_safely

POLL_SECONDS = 0.5
SHARE_OF_MEMORY = 0.8  # of a machine or a job, for packs; the rest is for Python, the corpus and others
Results = Generator[Ended | None]


class Executor(Protocol):
    """Trains packs somewhere."""

    @property
    def workers(self) -> int:
        """Packs that run at the same time."""

    @property
    def splits_over(self) -> int:
        """How many workers are worth cutting packs smaller for, so that none is idle."""

    def memory(self, device: str) -> float:
        """Bytes that one pack may take; infinite if that is not known."""

    def fitting(self, packs: Sequence[PackPlan]) -> Executor:
        """This one, or one with so few workers that the memory of its machine is enough for these packs."""

    def running(self, out: Path) -> Mapping[Job, str]:
        """The packs that an earlier call has started and that still go on, and where."""

    def __call__(self, jobs: Sequence[Job], running: Mapping[Job, str]) -> Results:
        """Train `jobs`. Yield what became of each of them and of `running`, and None while there is nothing to tell."""


def available_cores() -> int:
    """Cores that this process may use; fewer than the machine's inside a Slurm job or a container."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class LocalExecutor:
    """Trains packs on this machine, in `workers` processes; one worker is this process itself.

    Each trains a pack in as many `processes` as that has ranks.
    """

    workers: int
    processes: int = 1

    def sharing(self, processes: int) -> LocalExecutor:
        """This one for packs of so many processes each: with fewer workers."""
        return LocalExecutor(math.ceil(self.workers / processes), processes)

    def memory(self, device: str) -> float:
        """A worker's share of what this machine has."""
        if device == "cuda":
            gpus = torch.cuda.device_count()
            on_one = math.ceil(self.workers * min(self.processes, gpus) / gpus)
            return SHARE_OF_MEMORY * torch.cuda.get_device_properties(0).total_memory / on_one
        return SHARE_OF_MEMORY * main_memory() / self.workers

    def fitting(self, packs: Sequence[PackPlan]) -> LocalExecutor:
        """This one, or one with so few workers that their packs fit into main memory (the device is a CPU).

        Raises ConfigError if the largest pack does not fit alone.
        """
        largest = max(packs, key=pack_bytes, default=None)
        if largest is None:
            return self
        memory, needed = main_memory(), pack_bytes(largest) * self.processes
        if needed > memory:
            pack = f"a pack of {count(len(largest.trials), 'trial')} needs about {in_units(needed)}"
            first = largest.trials[0]
            key, smaller = f"model.width={first.model.width}", "a smaller pack.size, model or batch"
            if len(largest.trials) * snapshot_bytes(first, "cpu") > needed / 2:
                key = f"playbook.snapshot.kept={first.section('playbook.snapshot').kept}"
                smaller = f"fewer snapshots, or {smaller}"
            raise ConfigError(f"{key}: {pack}; allowed: at most the {in_units(memory)} of this machine: {smaller}")
        return LocalExecutor(max(1, min(self.workers, memory // needed)), self.processes)

    @property
    def splits_over(self) -> int:
        return self.workers

    def running(self, out: Path) -> Mapping[Job, str]:
        return {}

    def __call__(self, jobs: Sequence[Job], running: Mapping[Job, str]) -> Results:
        workers = min(self.workers, len(jobs))
        threads = max(1, available_cores() // max(1, workers))
        if workers <= 1:
            torch.set_num_threads(threads)
            flag = SimpleNamespace(value=0)
            with first_signal_asks(flag):
                for job in jobs:
                    if (result := train_until_asked(job, flag)) is None:
                        break
                    yield result
            return
        asked = multiprocessing.get_context("forkserver").Value("b", 0, lock=False)
        pool = worker_pool(workers, threads, self.processes, visible_gpus(), asked)
        try:
            # An exception in the midst of `wait` would leave locks taken for which the pool then waits forever.
            with first_signal_asks(asked, kept=2) as came:
                with signals_wait():
                    pending: dict[Future[Any], Job] = {
                        pool.schedule(_train_in_worker, args=(job,)): job for job in jobs
                    }
                while pending and len(came) < 2:
                    done, _ = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    yield None
                    for future in done:
                        if (result := _result(future, pending.pop(future))) is not None:
                            yield result
        finally:
            pool.stop()  # type: ignore[no-untyped-call]
            # Before `join` removes the pool's locks, without which a worker that is just starting would print a trace.
            for worker in multiprocessing.active_children():
                worker.terminate()
            pool.join()


def _result(future: Future[Ended | None], job: Job) -> Ended | None:
    """What became of a job in a worker; None if it was stopped. Raises FolderLost."""
    try:
        return future.result()
    except FolderLost:
        raise
    except Exception as error:  # the worker itself died: killed, out of memory
        return record_failure(job, f"worker died: {error}", f"{type(error).__name__}: {error}")


class Flag(Protocol):
    """What one process sets and another one, or a signal's handler and the loop, look at."""

    value: int


def train_until_asked(job: Job, asked: Flag) -> Ended | None:
    """Train a pack; None if it is `asked` to stop, at once or once a checkpoint is saved. Raises FolderLost."""
    if asked.value:
        return None
    checkpoints = job.checkpoints
    checkpoints.asked = lambda: bool(asked.value)
    try:
        return train_pack_safely(job, checkpoints)
    except Stopped:
        return None


def worker_pool(workers: int, threads: int, processes: int, gpus: Sequence[str], asked: Flag) -> ProcessPool:
    """Workers with so many threads each. Each sees as many of the GPUs as the packs that it trains have processes.

    They stop, with a checkpoint, once `asked` is not 0.
    """
    # forkserver: torch is imported once, in a process that has never started a thread or touched CUDA.
    context = _Context()
    context.set_forkserver_preload(["sweeps.running.job"])
    arguments = (threads, context.Value("i", 0), processes, gpus, asked)
    return ProcessPool(workers, context=context, initializer=_start_worker, initargs=arguments)


class _Worker(ForkServerProcess):
    """Does not load what this process runs, be it a user's script: nothing of that is needed to train a pack."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:  # the one place at which multiprocessing asks for the main module
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process)
        finally:
            sys.modules["__main__"] = main


class _Context(ForkServerContext):
    Process = _Worker


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = given.split(",") if given else map(str, range(torch.cuda.device_count()))
    return list(names)[: torch.cuda.device_count()]


def gpus_of(worker: int, processes: int, gpus: Sequence[str]) -> list[str]:
    """Those of one worker: workers, and the processes of each, take them in turn."""
    taken = range(worker * processes, (worker + 1) * processes)
    return list(dict.fromkeys(gpus[number % len(gpus)] for number in taken))


@contextlib.contextmanager
def heard_by(hear: Callable[[int, Any], None], *numbers: int) -> Generator[None]:
    """Signals of these numbers go to `hear` until the end of the block. They come to the main thread alone."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, hear) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_wait() -> Generator[None]:
    """Hold back Ctrl-C and SIGTERM, which would leave workers or jobs half started, until the end of the block.

    Processes that start in it never hear of Ctrl-C: it reaches the whole group, and the parent alone decides.
    """
    came: list[int] = []
    try:
        with heard_by(lambda number, frame: came.append(number), signal.SIGINT, signal.SIGTERM):
            resource_tracker.ensure_running()  # unblocks signals when it starts
            # For this thread's children; other threads still hear it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def first_signal_asks(flag: Flag, kept: int = 1) -> Generator[Sequence[int]]:
    """The first Ctrl-C or SIGTERM sets `flag`, and is heard at the end of the block.

    Yields those that came, up to so many as are `kept`; one more is heard at once, wherever the block is. Signals reach
    the main thread alone: elsewhere none comes.
    """
    came: list[int] = []
    handlers = contextlib.ExitStack()

    def hear(number: int, frame: object) -> None:
        if len(came) == kept:
            handlers.close()
            signal.raise_signal(number)
        came.append(number)
        if len(came) == 1:
            flag.value = 1
            os.write(2, b"stopping once checkpoints are saved; again to stop at once\n")

    with handlers:
        handlers.enter_context(heard_by(hear, signal.SIGINT, signal.SIGTERM))
        yield came
    if came:
        signal.raise_signal(came[0])


_asked: Any = None  # of this worker: not 0 once it is to stop


def _train_in_worker(job: Job) -> Ended | None:
    return train_until_asked(job, _asked)


def _start_worker(threads: int, started: Synchronized[int], processes: int, gpus: Sequence[str], asked: Flag) -> None:
    global _asked
    _asked = asked
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if gpus:  # before CUDA is touched, which reads this once
        with started.get_lock():
            worker = started.value
            started.value += 1
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(worker, processes, gpus))


def _die_with_parent() -> None:
    """A killed sweep leaves no worker behind that trains on unseen."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
