"""`stability-harness status OUT` and `cancel OUT`: how far a sweep is that nobody waits for, and its end."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from harness.basics.printing import count
from harness.config import ConfigError
from harness.storage.pack_info import KERNELS_CHANGED, NOT_RECORDED
from harness.storage.progress_files import ERRORS, PROGRESS, read_asked, read_progress
from harness.storage.records import Missing, Unreadable, read_bytes
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo, read_packs, read_root
from sweeps.commands.verify import verify
from sweeps.running.ledger import LOCK, LOCKS, lock_of
from sweeps.running.locks import is_locked
from sweeps.slurm.squeue import ours_and_others, scancel, user_name, with_numbers
from sweeps.slurm.submitted import submitted

MOST_LINES = 20  # failed or lost packs that are listed
MOST_TRACE = 2**20  # bytes that are read
MOST_LETTERS = 300  # of an error


@dataclass
class Status:
    """The trials of the last command that trained, and what is known of the packs of the folder."""

    asked: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    running: dict[str, str] = field(default_factory=dict)  # pack -> how far it is
    queued: dict[str, str] = field(default_factory=dict)  # pack -> its Slurm job
    failed: dict[str, str] = field(default_factory=dict)  # pack -> the last line of its trace
    stopped: dict[str, str] = field(default_factory=dict)  # pack -> how far its checkpoint is
    lost: dict[str, str] = field(default_factory=dict)  # pack -> how far it was when its process vanished
    slow: dict[str, str] = field(default_factory=dict)  # pack -> why its steps were not replayed on a GPU
    mixed: dict[str, str] = field(default_factory=dict)  # pack -> where the kernels of its CPU were others
    damaged: list[Unreadable] = field(default_factory=list)  # files that say nothing


def status_of(out: Path) -> Status:
    """What the folder of a sweep says, and Slurm's queue if packs were submitted.

    Raises ConfigError if there is no store, or if Slurm is needed and does not answer.
    """
    read_root(out)
    packs, status = list(read_packs(out)), Status()
    status.complete = {trial for pack in packs if pack.complete for trial in pack.attributes["ids"]}
    status.slow = _notes(packs, NOT_RECORDED)
    status.mixed = _notes(packs, KERNELS_CHANGED)
    status.asked = _asked(out, packs, status)
    slurm = submitted(out)
    status.damaged += slurm.damaged
    status.failed = {file.stem: _last_line(file) for file in sorted((out / ERRORS).glob("*.txt"))}
    progress, damaged = read_progress(out / PROGRESS)
    status.damaged += damaged.values()
    for pack, values in progress.items():
        how_far = f"step {values.steps} of {values.of}, {count(values.trials, 'trial')}"
        is_running = is_locked(lock_of(ResultsPath.at(out), pack))
        (status.running if is_running else status.stopped if values.is_stopped else status.lost)[pack] = how_far
    for pack, queued in ((job.pack.id, queued) for job, queued in slurm.jobs.items()):
        if pack not in status.running:
            for left in (status.stopped, status.lost):  # whatever its process has left
                left.pop(pack, None)
            if queued.state == "RUNNING":
                status.running[pack] = f"Slurm job {queued.number}, starting"
            else:
                status.queued[pack] = f"Slurm job {queued.number}, {queued.description}"
    for queued in slurm.unnamed:
        status.queued[f"Slurm job {queued.number}"] = f"{queued.description}; what it trains cannot be read"
    status.lost = {pack: how_far for pack, how_far in status.lost.items() if pack not in status.failed}
    return status


def _asked(out: Path, packs: Sequence[PackInfo], status: Status) -> set[str]:
    """What the last command that trained asked for; if that cannot be known, what the store holds."""
    try:
        return set(read_asked(out).trials)
    except Missing:  # an older store
        pass
    except Unreadable as error:
        status.damaged.append(error)
    return {trial for pack in packs for trial in pack.attributes["ids"]}


def _notes(packs: Sequence[PackInfo], name: str) -> dict[str, str]:
    """What packs say of their environment under a name."""
    notes = ((pack.id, pack.attributes["environment"].get(name)) for pack in packs)
    return {pack: str(text) for pack, text in notes if text}


def _last_line(trace: Path) -> str:
    """Of the trace of a pack that crashed: the error."""
    try:
        text = read_bytes(trace, MOST_TRACE, is_cut=True).decode(errors="replace")
    except Unreadable as error:
        return f"its trace {error.reason}"
    head, _, _ = text.partition("\n\ntrials of this pack:")
    last = next((line.strip() for line in reversed(head.splitlines()) if line.strip()), "no trace")
    return textwrap.shorten(last, MOST_LETTERS, placeholder=" ...")


def print_status(out: Path, console: Console) -> int:
    """The counts, and a line for each pack that runs, waits, has failed or was lost. Returns the exit status, 0."""
    status = status_of(out)
    done = len(status.asked & status.complete)
    console.print(f"{out}: {done} of {count(len(status.asked), 'trial')} done", soft_wrap=True)
    for name in ("running", "queued", "stopped", "failed", "lost"):
        packs = getattr(status, name)
        console.print(f"{name}: {count(len(packs), 'pack')}")
        _print_some([f"  {pack}  {text}" for pack, text in packs.items()], console)
    if status.slow:
        console.print(f"slower than they could be: {count(len(status.slow), 'pack')}")
        _print_some([f"  {pack}  {text}" for pack, text in status.slow.items()], console)
    if status.mixed:
        console.print(f"trained with more than one kind of kernels: {count(len(status.mixed), 'pack')}")
        _print_some([f"  {pack}  {text}" for pack, text in status.mixed.items()], console)
    _print_some([f"left out: {error}" for error in status.damaged], console)
    if status.failed or status.lost or (done < len(status.asked) and not status.running and not status.queued):
        console.print("the same command as before trains what is not done")
    return 0


def _print_some(lines: Sequence[str], console: Console) -> None:
    for line in lines[:MOST_LINES]:
        console.print(line, soft_wrap=True)
    if len(lines) > MOST_LINES:
        console.print(f"  and {len(lines) - MOST_LINES} more")


def cancel(out: Path, console: Console) -> int:
    """Take this folder's jobs out of Slurm's queue; what was trained stays. Raises as `status_of` does.

    The exit status is 1 if some stay there: another user's, or those of a folder that this one is a copy of.
    """
    read_root(out)
    noted = submitted(out)  # where a sweep was killed while it submitted, sbatch has ended then
    ours, others = ours_and_others(out)
    if ours and (refusal := scancel(ours)):
        raise ConfigError(f"cancel {out}: scancel failed: {refusal}; allowed: a running Slurm")
    console.print(f"cancelled {count(len(ours), 'Slurm job')}; the same command as before goes on from here")
    _print_some([f"left out: {error}" for error in noted.damaged], console)
    doubted = noted.numbers - {job.number for job in (*ours, *others)}
    strangers = [job for job in with_numbers(doubted) if job.number in doubted]
    for job in others[:MOST_LINES]:
        owner = f"{user_name(job.user)} for {str(job.out)!r}"
        console.print(f"Slurm job {job.number} of {owner} is not this folder's: left alone", soft_wrap=True)
    for job in strangers[:MOST_LINES]:
        owner = f"{user_name(job.user)}, {job.name!r:.60},"
        console.print(f"Slurm job {job.number} of {owner} is not this sweep's: left alone", soft_wrap=True)
    held = [file for file in (ResultsPath.at(out) / LOCKS).entries() if file.name.endswith(LOCK) and is_locked(file)]
    if held and not ours:
        console.print(f"{count(len(held), 'pack')} in training by a command on a machine: Ctrl-C there ends it")
    return 1 if others else 0


def run(arguments: list[str], console: Console) -> int:
    """`status OUT`, `cancel OUT` or `verify OUT`; the exit status. Raises ConfigError for anything else."""
    name, *folders = arguments
    if len(folders) != 1:
        raise ConfigError(f"{' '.join(arguments)}: allowed: {name} and the folder of one sweep")
    return ACTS[name](Path(folders[0].removeprefix("out=")), console)


ACTS: dict[str, Callable[[Path, Console], int]] = {"status": print_status, "cancel": cancel, "verify": verify}
