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
from typing import IO, Any

from harness.config import ConfigError, trial_from_dict
from harness.storage.records import Unreadable, parse_json, record_of
from harness.storage.results_folder import MARKER, LinkRefused, ResultsPath
from harness.storage.stored import is_complete
from injectors import fault_types
from sweeps.compose.settings import Run, check_key
from sweeps.planning.planner import PackPlan
from sweeps.running.job import Job
from sweeps.slurm.squeue import FOLDER, NUMBER, TOKEN, Queued, name_of, queue_of, submitters

PACKS, SUBMITTING = "packs", "submitting"
KEYS = ("device", "telemetry.block", "checkpoint.every", "checkpoint.minutes", "ranks", "keep")
NOTED = {key.rpartition(".")[2]: key for key in KEYS}  # the settings of a run in a record, by their names there
MOST_BYTES, MOST_OF_ARRAY = 2**26, 2**30  # of one note, and of what is being submitted
MOST_NAMED = 3  # damaged files, in an error
_PACK = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A pack that is being submitted, and how it is to be trained."""

    trials: tuple[Mapping[str, Any], ...]
    witnesses: tuple[str, ...]
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

    packs: dict[str, Queued] = field(default_factory=dict)  # by id
    jobs: list[Job] = field(default_factory=list)  # the same
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
    notes = _notes(folder, slurm)
    now = queue_of(folder, users)
    if before is None or now is None:
        _check_done(folder, notes, slurm)
        return slurm
    _look_up(folder, notes, now, slurm)
    # What came into the queue meanwhile may just be written down.
    slurm.unnamed = [job for number, job in now.items() if number in before and number not in slurm.numbers]
    return slurm


def running_jobs(out: Path) -> tuple[list[Job], list[str]]:
    """The packs in Slurm's queue that this sweep has not to train, and what is damaged but in nobody's way, in words.

    Raises ConfigError if Slurm is needed and does not answer, or if it has jobs of which nobody knows what they train.
    """
    slurm = submitted(out)
    queue = sorted({job.number for job in (*slurm.unnamed, *slurm.packs.values())})
    if slurm.unnamed or (slurm.doubtful and queue):
        files = ", ".join(map(str, slurm.damaged[:MOST_NAMED])) or "their notes are gone"
        raise ConfigError(
            f"out={out}: Slurm has jobs of this sweep ({_some(queue)}), and what they train cannot be read ({files}); "
            f"allowed: the same command once they have ended, or after: stability-harness cancel {out}"
        )
    return slurm.jobs, [f"left out: {error}" for error in slurm.damaged]


def numbers_of(folder: ResultsPath, jobs: Sequence[Job]) -> dict[Job, str]:
    """The Slurm job of each of these, which were in the queue. Raises ConfigError if a note was damaged since."""
    slurm = Submitted()
    notes = _notes(folder, slurm, {job.pack.id for job in jobs})
    for error in slurm.damaged:
        raise ConfigError(f"{error}; allowed: a note as a sweep writes it")
    return {job: notes[job.pack.id].job for job in jobs if job.pack.id in notes}


def _settle(folder: ResultsPath, users: set[int], slurm: Submitted) -> None:
    """Write down the jobs of processes that were killed before they could, if Slurm has them."""
    for file in _files(folder / FOLDER / SUBMITTING, TOKEN, slurm):
        try:
            with os.fdopen(file.descriptor(os.O_RDWR), "r+") as handle:
                _lock(handle)  # until whoever submits it has done so
                groups = _groups(file)  # is gone if that one has written it down, too
                queue = queue_of(folder, users)
                if queue is None:
                    return  # the file stays, for a time when Slurm answers
                for array in {n.split("_")[0] for n, j in queue.items() if j.name == name_of(folder, file.stem)}:
                    write_down_all(folder, groups, array)
                file.unlink()
        except FileNotFoundError:
            pass
        except Unreadable as error:
            slurm.damaged.append(error)
        except (OSError, LinkRefused) as error:
            slurm.damaged.append(_unreadable(file, error))


def _groups(file: ResultsPath) -> list[list[Job]]:
    """What is being submitted, by array task. Raises Unreadable, and FileNotFoundError."""
    values = _parsed(file, MOST_OF_ARRAY)
    if not isinstance(values, list) or not values or not all(isinstance(group, list) and group for group in values):
        raise Unreadable(file.path, "is no list of lists of packs")
    return [[_job(record_of(record, Packed, file.path), file) for record in group] for group in values]


def _notes(folder: ResultsPath, slurm: Submitted, wanted: set[str] | None = None) -> dict[str, Note]:
    """By pack. What is damaged is told in `found`."""
    notes: dict[str, Note] = {}
    for file in _files(folder / FOLDER / PACKS, _PACK, slurm):
        if wanted is None or file.stem in wanted:
            with contextlib.suppress(FileNotFoundError), _doubted(file, slurm):
                note = record_of(_parsed(file, MOST_BYTES), Note, file.path)
                notes[file.stem] = note
                slurm.numbers.add(note.job)
    return notes


def _look_up(folder: ResultsPath, notes: Mapping[str, Note], queue: Mapping[str, Queued], slurm: Submitted) -> None:
    """Which noted packs have a job in the queue."""
    for pack, note in notes.items():
        if note.job in queue:
            file = folder / FOLDER / PACKS / f"{pack}.json"
            with _doubted(file, slurm):
                job = _job(note, file)
                if job.pack.id != pack:
                    raise Unreadable(file.path, f"is of another pack, {job.pack.id}")
                slurm.jobs.append(job)
                slurm.packs[pack] = queue[note.job]


def _job(record: Packed, file: ResultsPath) -> Job:
    """Of a record. Raises Unreadable."""
    try:
        trials = tuple(trial_from_dict(values, fault_types()) for values in record.trials)
        settings = {key: check_key(key, getattr(record, name)) for name, key in NOTED.items()}
        pack = PackPlan(trials, frozenset(record.witnesses))
        if not pack.recorded or not pack.witnesses <= {trial.id for trial in trials}:
            raise ValueError("no trials of its own, or witnesses that are none of them")
        return Job(pack, Run.of(settings, file.root), file.id)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Unreadable(file.path, f"holds no pack ({type(error).__name__}: {str(error)!r:.100})") from None


def _parsed(file: ResultsPath, most_bytes: int) -> Any:
    """The JSON in it. Raises Unreadable, and FileNotFoundError."""
    try:
        return parse_json(file.read_bytes(most_bytes), file.path)
    except FileNotFoundError:
        raise
    except (OSError, LinkRefused) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: ResultsPath, error: OSError | LinkRefused) -> Unreadable:
    if isinstance(error, LinkRefused):
        return Unreadable(file.path, "is a link, or not what belongs there")
    return Unreadable(file.path, f"cannot be read ({error.strerror or error})")


def _files(place: ResultsPath, stem: re.Pattern[str], slurm: Submitted) -> list[ResultsPath]:
    """The files of ours in this folder, as their names say."""
    try:
        return [file for file in place.entries() if file.name.endswith(".json") and stem.fullmatch(file.stem)]
    except (OSError, LinkRefused) as error:
        slurm.damaged.append(_unreadable(place, error))
        return []


@contextlib.contextmanager
def _doubted(file: ResultsPath, slurm: Submitted) -> Iterator[None]:
    """Tell what is damaged, and whether its pack has still to be trained."""
    try:
        yield
    except Unreadable as error:
        slurm.damaged.append(error)
        if not is_complete(file.root, file.stem):
            slurm.doubtful.add(file.stem)


def _check_done(folder: ResultsPath, notes: Mapping[str, Note], slurm: Submitted) -> None:
    """Slurm does not answer. Raises ConfigError unless the store says that nothing can be in its queue."""
    is_open = _files(folder / FOLDER / SUBMITTING, TOKEN, slurm) or slurm.doubtful
    if is_open or not all(is_complete(folder.root, pack) for pack in notes):
        raise ConfigError(
            f"out={folder.root}: its packs were submitted, and squeue does not answer; allowed: a running Slurm"
        )


def _some(numbers: Sequence[str]) -> str:
    return ", ".join(numbers[:3]) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
