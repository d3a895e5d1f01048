"""Which packs were submitted to Slurm, and what its queue says of them.

    <out>/slurm/packs/<pack>.json          the job that works at a pack, and the pack
    <out>/slurm/submitting/<token>.json    the packs of an array that sbatch was asked for, while they are not there yet

An array is named `sweep-<token>`. So where a process was killed before it wrote down the number that sbatch answered,
the next one asks Slurm by that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from harness.config import ConfigError, trial_from_dict
from harness.results_folder import ResultsPath
from injectors import fault_types
from sweeps.planner import PackPlan
from sweeps.run import Job

FOLDER, PACKS, SUBMITTING = "slurm", "packs", "submitting"
NAME = "sweep-"  # of an array, before its token
OWN_FIELDS = tuple(field.name for field in fields(Job) if field.name not in ("pack", "out"))  # of a job in a record


@contextlib.contextmanager
def submitting(out: Path, token: str, groups: Sequence[Sequence[Job]]) -> Generator[IO[str]]:
    """Keep in a locked file what is going to be submitted, until the block has written down its number."""
    file = out / FOLDER / SUBMITTING / f"{token}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    hidden = file.with_suffix(".new")  # nobody may find it before it is locked
    with hidden.open("w") as handle:
        _lock(handle)
        json.dump([[_record(job) for job in group] for group in groups], handle)
        handle.flush()
        os.fsync(handle.fileno())
        hidden.replace(file)
        yield handle
        file.unlink(missing_ok=True)


def _lock(handle: IO[str]) -> None:
    """Wait for the lock, and hold it until the file is closed, here and in children that were given it."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)


def _settle(out: Path) -> None:
    """Write down the jobs of processes that were killed before they could, if Slurm has them.

    Raises ConfigError if Slurm does not answer.
    """
    for file in sorted((out / FOLDER / SUBMITTING).glob("*.json")):
        with contextlib.suppress(FileNotFoundError), file.open("r+") as handle:
            _lock(handle)  # until whoever submits it has done so
            groups = json.loads(file.read_text())  # is gone if that one has written it down, too
            queued = _squeue(f"--name={NAME}{file.stem}")
            if queued is None:
                raise _silent(out)
            for number in {job.split("_")[0] for job in queued}:
                write_down_all([[_job(record, out) for record in group] for group in groups], number)
            file.unlink()


def write_down_all(groups: Sequence[Sequence[Job]], array: str) -> dict[Job, str]:
    """Keep which job of the array trains which pack, and return that."""
    numbers = {job: f"{array}_{task}" for task, group in enumerate(groups) for job in group}
    for job, number in numbers.items():
        _write_down(job, number)
    return numbers


def _write_down(job: Job, number: str) -> None:
    """Keep which Slurm job trains this pack, and the pack itself, as JSON."""
    file = ResultsPath.open(job.out) / FOLDER / PACKS / f"{job.pack.id}.json"
    file.parent.make_folder()
    file.write(json.dumps({"job": number, **_record(job)}).encode())


def _record(job: Job) -> dict[str, Any]:
    """The job as JSON takes it; where its store is, the place of the record says."""
    trials = [trial.to_dict() for trial in job.pack.trials]
    own = {name: getattr(job, name) for name in OWN_FIELDS}
    return {**own, "trials": trials, "witnesses": sorted(job.pack.witnesses)}


def _job(record: Mapping[str, Any], out: Path) -> Job:
    """Of a record."""
    trials = tuple(trial_from_dict(values, fault_types()) for values in record["trials"])
    own = {name: record[name] for name in OWN_FIELDS if name in record}
    return Job(PackPlan(trials, frozenset(record["witnesses"])), out, **own)


def read_notes(out: Path) -> dict[Job, str]:
    """Every pack that was submitted for this store, with the Slurm job that was the last to train it."""
    records = [json.loads(file.read_text()) for file in sorted((out / FOLDER / PACKS).glob("*.json"))]
    return {_job(record, out): record["job"] for record in records}


def _silent(out: Path) -> ConfigError:
    return ConfigError(f"out={out}: its packs were submitted, and squeue does not answer; allowed: a running Slurm")


def queued_jobs(out: Path) -> dict[str, tuple[str, str]]:
    """The packs that were submitted for this store and have not left Slurm's queue: their job, and its state.

    Raises ConfigError if Slurm does not answer.
    """
    _settle(out)
    numbers = {job.pack.id: number for job, number in read_notes(out).items()}
    states = states_of(numbers.values())
    if states is None:
        raise _silent(out)
    return {pack: (number, states[number]) for pack, number in numbers.items() if number in states}


def states_of(numbers: Iterable[str]) -> dict[str, str] | None:
    """Which of these jobs are pending or running, and their states; None if Slurm does not answer just now."""
    arrays = sorted({number.split("_")[0] for number in numbers})
    return _squeue(f"--jobs={','.join(arrays)}") if arrays else {}


def _squeue(choice: str) -> dict[str, str] | None:
    """The chosen jobs that are pending or running, and their states; None if Slurm does not answer just now.

    From squeue, which is exact: sacct hears of a job seconds later, and of some cancelled array tasks never.
    """
    command = ["squeue", "--noheader", "--array", "--format=%i %T", choice]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())
