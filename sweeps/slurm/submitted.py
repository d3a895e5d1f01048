"""Which packs were submitted to Slurm for a results folder, and which of them are still in its queue.

    <out>/slurm/packs/<pack>.json          the job that was the last to be given a pack, and the pack
    <out>/slurm/submitting/<token>.json    the packs of an array that sbatch was asked for, while they are not there yet

What stands in them is a stranger's word: it counts for jobs alone of which Slurm says that they are this folder's
(`sweeps/slurm/squeue.py`). An array's name has its token, so where a process was killed before it wrote down the
number that sbatch answered, the next one finds it by that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from harness.config import ConfigError, trial_from_dict
from harness.storage.records import Unreadable, parse_json, record_of
from harness.storage.results_folder import MARKER, LinkRefused, ResultsPath
from harness.storage.stored import is_complete
from sweeps.planning.packs import PACK_ID, PackPlan
from sweeps.slurm.squeue import FOLDER, NUMBER, TOKEN, Queued, name_of, queue_of, submitters

if TYPE_CHECKING:
    from sweeps.running.job import Job

PACKS, SUBMITTING = "packs", "submitting"
KEYS = ("device", "telemetry.block", "checkpoint.every", "checkpoint.minutes", "ranks", "keep")
NOTED = {key.rpartition(".")[2]: key for key in KEYS}  # the settings of a run in a record, by their names there
MOST_BYTES, MOST_OF_ARRAY = 2**26, 2**30  # of one note, and of what is being submitted
MOST_NAMED = 3  # damaged files, in an error


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A pack that is being submitted, and how it is to be trained."""

    trials: tuple[Mapping[str, Any], ...]
    witnesses: tuple[str, ...]  # ids of the unstored twins
    device: str
    block: int
    every: int | None
    minutes: float | None
    ranks: str
    keep: str = "nothing"


@dataclass(frozen=True, kw_only=True)
class Note(Packed):
    """A pack that was submitted, and the job that trains it."""

    job: str

    def __post_init__(self) -> None:
        if not NUMBER.fullmatch(self.job):
            raise ValueError(f"job is {self.job!r:.40}, not the number of a Slurm job")


@dataclass
class Submitted:
    """What was submitted for a results folder and has not left Slurm's queue."""

    jobs: dict[Job, Queued] = field(default_factory=dict)
    unnamed: list[Queued] = field(default_factory=list)  # this folder's jobs of which no note says what they train
    damaged: list[Unreadable] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)  # of all notes, whose ever they are
    doubtful: set[str] = field(default_factory=set)  # packs that are not done, and whose note is damaged


# --- written ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def submitting(folder: ResultsPath, token: str, groups: Sequence[Sequence[Job]]) -> Generator[IO[str]]:
    """Keep in a locked file what is going to be submitted, until the block has written down its number."""
    place = folder / FOLDER / SUBMITTING
    place.make_folder()
    hidden = place / f".{token}.json"  # nobody may find it before it is locked
    with os.fdopen(hidden.descriptor(os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as handle:
        try:
            _lock(handle)
            json.dump([[_record(job) for job in group] for group in groups], handle)
            handle.flush()
            os.fsync(handle.fileno())
            hidden.rename(f"{token}.json")
        except BaseException:
            hidden.unlink()
            raise
        yield handle
        (place / f"{token}.json").unlink()


def forget(folder: ResultsPath, token: str) -> None:
    """Remove what was kept and written of an array that Slurm has refused."""
    (folder / FOLDER / SUBMITTING / f"{token}.json").unlink()
    (folder / FOLDER / token).remove_tree()


def _lock(handle: IO[str]) -> None:
    """Wait for the lock, and hold it until the file is closed, here and in children that were given it."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)


def write_down_all(folder: ResultsPath, groups: Sequence[Sequence[Job]], array: str) -> dict[Job, str]:
    """Keep which job of the array trains which pack, and return that."""
    numbers = {job: f"{array}_{task}" for task, group in enumerate(groups) for job in group}
    (folder / FOLDER / PACKS).make_folder()
    for job, number in numbers.items():
        note = folder / FOLDER / PACKS / f"{job.pack.id}.json"
        note.write(json.dumps({"job": number, **_record(job)}).encode())
    return numbers


def _record(job: Job) -> dict[str, Any]:
    """The job as JSON takes it; where its store is, the place of the record says."""
    return {name: attrgetter(key)(job.run) for name, key in NOTED.items()} | job.pack.to_dict()


# --- read ------------------------------------------------------------------------------------------------------------


def submitted(out: Path) -> Submitted:
    """What Slurm's queue has for the results folder `out`.

    Raises ConfigError if Slurm is needed and does not answer, which it is unless everything submitted is done.
    """
    slurm = Submitted()
    if not (out / MARKER).exists():
        return slurm
    folder = ResultsPath.open(out)
    if not (folder / FOLDER).exists():
        return slurm
    users = submitters(folder)
    before = queue_of(folder, users)
    if before is not None:
        _settle(folder, users, slurm)
    notes: dict[ResultsPath, Note] = {}
    for file in _files(folder / FOLDER / PACKS, PACK_ID, slurm):
        with _told(file, slurm, is_note=True):
            notes[file] = record_of(parse_json(file.read_bytes(MOST_BYTES), file.path), Note, file.path)
    slurm.numbers = {note.job for note in notes.values()}
    now = queue_of(folder, users)
    if before is None or now is None:
        is_open = _files(folder / FOLDER / SUBMITTING, TOKEN, slurm) or slurm.doubtful
        if is_open or not all(is_complete(folder.root, file.stem) for file in notes):
            raise ConfigError(
                f"out={folder.root}: its packs were submitted, and squeue does not answer; allowed: a running Slurm"
            )
        return slurm
    for file, note in notes.items():
        if note.job in now:
            with _told(file, slurm, is_note=True):
                job = _job(note, file)
                if job.pack.id != file.stem:
                    raise Unreadable(file.path, f"is of another pack, {job.pack.id}")
                slurm.jobs[job] = now[note.job]
    # What came into the queue meanwhile may just be written down.
    slurm.unnamed = [job for number, job in now.items() if number in before and number not in slurm.numbers]
    return slurm


def running_jobs(out: Path) -> tuple[dict[Job, str], list[str]]:
    """The packs in Slurm's queue, which this sweep need not train, with the numbers of their jobs.

    The second value says in words which records are damaged but in nobody's way.

    Raises ConfigError if Slurm is needed and does not answer, or if it has jobs of which nobody knows what they train.
    """
    slurm = submitted(out)
    queue = sorted({job.number for job in (*slurm.unnamed, *slurm.jobs.values())})
    if slurm.unnamed or (slurm.doubtful and queue):
        numbers = ", ".join(queue[:MOST_NAMED]) + (f" and {len(queue) - MOST_NAMED} more" if queue[MOST_NAMED:] else "")
        files = ", ".join(map(str, slurm.damaged[:MOST_NAMED])) or "their notes are gone"
        raise ConfigError(
            f"out={out}: Slurm has jobs of this sweep ({numbers}), and what they train cannot be read ({files}); "
            f"allowed: the same command once they have ended, or after: stability-harness cancel {out}"
        )
    numbers_of_jobs = {job: queued.number for job, queued in slurm.jobs.items()}
    return numbers_of_jobs, [f"left out: {error}" for error in slurm.damaged]


def _settle(folder: ResultsPath, users: set[int], slurm: Submitted) -> None:
    """Write down the jobs of processes that were killed before they could, if Slurm has them."""
    for file in _files(folder / FOLDER / SUBMITTING, TOKEN, slurm):
        with _told(file, slurm), os.fdopen(file.descriptor(os.O_RDWR), "r+") as handle:
            _lock(handle)  # until whoever submits it has done so
            # Is gone if that one has written it down, too.
            values = parse_json(file.read_bytes(MOST_OF_ARRAY), file.path)
            if not isinstance(values, list) or not values or not all(isinstance(of, list) and of for of in values):
                raise Unreadable(file.path, "is no list of lists of packs")
            groups = [[_job(record_of(record, Packed, file.path), file) for record in group] for group in values]
            queue = queue_of(folder, users)
            if queue is None:
                return  # the file stays, for a time when Slurm answers
            for array in {n.split("_")[0] for n, j in queue.items() if j.name == name_of(folder, file.stem)}:
                write_down_all(folder, groups, array)
            file.unlink()


def _job(record: Packed, file: ResultsPath) -> Job:
    """Of a record. Raises Unreadable."""
    from injectors import fault_types  # loads torch, which `status` of a folder without jobs does not need
    from sweeps.compose.settings import RunSettings, check_key
    from sweeps.running.job import Job

    try:
        trials = tuple(trial_from_dict(values, fault_types()) for values in record.trials)
        settings = {key: check_key(key, getattr(record, name)) for name, key in NOTED.items()}
        pack = PackPlan(trials, frozenset(record.witnesses))
        if not pack.recorded or not pack.unstored <= {trial.id for trial in trials}:
            raise ValueError("no trials of its own, or unstored twins that are none of them")
        return Job(pack, RunSettings.of(settings, file.root), file.id)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Unreadable(file.path, f"holds no pack ({type(error).__name__}: {str(error)!r:.100})") from None


def _files(place: ResultsPath, stem: str | re.Pattern[str], slurm: Submitted) -> list[ResultsPath]:
    """The files of ours in this folder, as their names say."""
    with _told(place, slurm):
        return [file for file in place.entries() if file.name.endswith(".json") and re.fullmatch(stem, file.stem)]
    return []


@contextlib.contextmanager
def _told(file: ResultsPath, slurm: Submitted, is_note: bool = False) -> Iterator[None]:
    """Tell what is damaged; of a note also whether its pack has still to be trained. What is gone says nothing."""
    try:
        yield
        return
    except FileNotFoundError:
        return
    except LinkRefused:
        damage = Unreadable(file.path, "is a link, or not what belongs there")
    except OSError as error:
        damage = Unreadable(file.path, f"cannot be read ({error.strerror or error})")
    except Unreadable as error:
        damage = error
    slurm.damaged.append(damage)
    if is_note and not is_complete(file.root, file.stem):
        slurm.doubtful.add(file.stem)
