"""The processes of a pack's data-parallel ranks, where they are real: rank 0, which has the pack, starts the others.

They are plain commands and no children of `multiprocessing`, because a pack is often trained in a worker of a pool, and
such a worker may have no children there. What a rank is to do, and the trace of its errors, are files in a folder of
rank 0. Its standard input stays open for as long as rank 0 lives: however that ends, the others see it and end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.basics.cpu_kernels import chosen_kernels, cpu_kernels
from harness.basics.devices import on_cpu
from harness.training.distributed import RankGroup, RankLost

LOST = 75  # the exit status of a rank that has lost another one: that one's end is the reason
POLL_SECONDS = 0.05
GRACE_SECONDS = 60.0  # for ranks to end, once rank 0 has ended or lost one of them
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # rank 0 decides what they mean
COMMAND = f"""
import signal
for number in {tuple(map(int, IGNORED))}:
    signal.signal(number, signal.SIG_IGN)
from sweeps.running.processes import _main
_main()
"""


class RankFailed(RuntimeError):
    """A rank has ended with an error; the message has its trace."""


class RankKilled(RankFailed):
    """A rank was killed, for want of memory or by somebody: its pack can go on from a checkpoint."""


@dataclass(frozen=True)
class Started:
    """Another rank's process, and where its standard error goes."""

    rank: int
    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def status(self) -> int | None:
        return self.process.poll()


@contextlib.contextmanager
def share_of_threads(processes: int, asked: int | None = None) -> Iterator[None]:
    """So many processes share the cores that this one had; or each has as many threads as are `asked` for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(asked or max(1, threads // processes))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def ranks(
    count: int, device: torch.device, target: Callable[..., None], arguments: Sequence[Any] = ()
) -> Iterator[RankGroup]:
    """Be rank 0 of `count` for the length of the block. In each other rank's process runs `target(group, *arguments)`.

    They have as many threads each as this process has, and its kernels of matrix products. Raises RankFailed if one of
    them fails, with its trace.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        others: list[Started] = []
        try:
            place = Path(folder) / "store"
            kernels = chosen_kernels() if on_cpu(device) else None
            work = pickle.dumps((count, device, str(place), torch.get_num_threads(), kernels, target, arguments))
            (Path(folder) / "work").write_bytes(work)
            for rank in range(1, count):
                others.append(_start(rank, Path(folder)))
            store = dist.FileStore(str(place), count)  # type: ignore[attr-defined]
            _wait_until_ready(others, store)
            try:
                group = RankGroup(0, count, store, device)
                with contextlib.closing(group), _watched(others, group):
                    yield group
                    _wait_until_over(others)
            except RankLost as error:
                raise _reason(others, count, error) from None
        finally:
            for other in others:
                with other.process:  # which closes its pipe, and waits for it
                    other.process.kill()


def _start(rank: int, folder: Path) -> Started:
    errors = folder / f"{rank}.txt"
    command = [sys.executable, "-P", "-c", COMMAND, str(rank), str(folder / "work")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with errors.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment)
    return Started(rank, process, errors)


def _wait_until_ready(others: Sequence[Started], store: Any) -> None:
    """Until all have come to the store: from then on the end of one is noticed by those that talk to it."""
    while not all(store.check([f"ready {other.rank}"]) for other in others):
        if any(other.status is not None for other in others):
            raise _reason(others, len(others) + 1, None)
        time.sleep(POLL_SECONDS)


def _wait_until_over(others: Sequence[Started]) -> None:
    """Raises RankLost unless all end well."""
    deadline = time.monotonic() + GRACE_SECONDS
    for other in others:
        with contextlib.suppress(subprocess.TimeoutExpired):
            other.process.wait(max(0.0, deadline - time.monotonic()))
        if other.status != 0:
            raise RankLost(f"rank {other.rank} does not end")


@contextlib.contextmanager
def _watched(others: Sequence[Started], group: RankGroup) -> Iterator[None]:
    """A GPU waits without end for a rank that has ended; not so under this watch."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(1.0):
            if any(other.status for other in others):
                group.abort()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _reason(others: Sequence[Started], count: int, lost: RankLost | None) -> RankFailed:
    """Why ranks are lost: the first that has not ended because of another."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        for other in others:
            status = other.status
            if status not in (None, 0, LOST):
                return _failure(other, status, count)
        if all(other.status is not None for other in others):
            break
        time.sleep(POLL_SECONDS)
    ended = [f"rank {other.rank} has ended with status {other.status}" for other in others]
    return RankFailed(f"{lost or 'a rank has ended early'} ({', '.join(ended)})")


def _failure(other: Started, status: int, count: int) -> RankFailed:
    said = other.errors.read_bytes().decode(errors="replace").strip()
    name = f"rank {other.rank} of {count}"
    if status < 0:
        return RankKilled(f"{name} was killed by {signal.Signals(-status).name}\n{said}".strip())
    last = said.splitlines()[-1] if said else f"exit status {status}"
    return RankFailed(f"{name}: {last}\n\n{said}")


# --- in the process of another rank ------------------------------------------------------------------------------


def _main() -> None:
    """What the command of another rank runs."""
    threading.Thread(target=_die_with_rank_0, daemon=True).start()
    try:
        rank, work = int(sys.argv[1]), Path(sys.argv[2]).read_bytes()
        count, device, place, threads, kernels, target, arguments = pickle.loads(work)
        torch.set_num_threads(threads)
        if kernels is not None:
            cpu_kernels(kernels)
        store = dist.FileStore(place, count)  # type: ignore[attr-defined]
        store.set(f"ready {rank}", "")
        target(RankGroup(rank, count, store, device), *arguments)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        status = LOST if isinstance(error, RankLost) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: a group takes its time to close where others have ended


def _die_with_rank_0() -> None:
    """Its end closes the other side of standard input."""
    sys.stdin.buffer.read()
    os._exit(1)
