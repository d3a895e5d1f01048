"""Train one pack from its plan to its place in the store. This is what every kind of worker calls.

Beside the store:

    <out>/progress/<pack>.json      how far a pack in training is
    <out>/checkpoints/<pack>/       its state: `harness/checkpoint.py`; gone once it is complete
    <out>/locks/<pack>.lock         held by the process that trains it
    <out>/errors/<pack>.txt         the trace of one that crashed
    <out>/plan.json                 the trials that the last command that had any to train asked for
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from harness.checkpoint import Checkpoints, Stopped, about
from harness.config import ConfigError, Data, Trial, trial_from_dict
from harness.corpus import Corpus, load_corpus
from harness.loop import Result, train
from harness.pack import Pack
from harness.precision import make_deterministic, pick_device
from harness.schedules import rates_of
from harness.sites import Agenda, Injector
from harness.store import PackStore, read_pack_attrs, write_atomically
from injectors import FaultContext, InjectableFault, fault_types
from injectors.fault import places_of
from sweeps.planner import PackPlan

PROGRESS, ERRORS, CHECKPOINTS, LOCKS = "progress", "errors", "checkpoints", "locks"
PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """A pack and where it goes. Travels to worker processes and to Slurm."""

    pack: PackPlan
    out: Path
    device: str
    block: int
    every: int | None = None  # steps between checkpoints
    minutes: float | None = None

    @property
    def checkpoints(self) -> Checkpoints:
        about = {"trials": [trial.to_dict() for trial in self.pack.trials], "witnesses": sorted(self.pack.witnesses)}
        seconds = None if self.minutes is None else 60 * self.minutes
        return Checkpoints(self.out / CHECKPOINTS / self.pack.id, self.every, seconds, about)

    @property
    def lock_file(self) -> Path:
        return self.out / LOCKS / f"{self.pack.id}.lock"

    @property
    def progress_file(self) -> Path:
        return self.out / PROGRESS / f"{self.pack.id}.json"

    @property
    def error_file(self) -> Path:
        return self.out / ERRORS / f"{self.pack.id}.txt"


@dataclass(frozen=True)
class Finished:
    """What the parent process needs to know of a trained pack."""

    pack: str
    outcome: tuple[str, ...]
    idle_faults: int  # trials whose fault never fired, or changed nothing


@dataclass(frozen=True)
class Failed:
    """A pack that crashed; its trace is in `trace`."""

    pack: str
    reason: str
    trace: Path


@dataclass(frozen=True)
class Elsewhere:
    """A pack that another process trains at this moment."""

    pack: str


@lru_cache(maxsize=4)
def corpus_of(data: Data, context: int) -> Corpus:
    """The corpus, read once a process."""
    return load_corpus(data, context)


def injector_of(trial: Trial, corpus: Corpus) -> Injector | None:
    """The trial's fault, armed."""
    if not isinstance(trial.fault, InjectableFault):
        return None
    places, rates = places_of(trial, corpus.vocabulary), rates_of(trial)
    context = FaultContext(trial, places, corpus.train, corpus.counts, rates, trial.seeds["fault"], corpus.fingerprint)
    return trial.fault.arm(context)


def train_pack(job: Job, checkpoints: Checkpoints | None = None) -> Finished | Elsewhere:
    """Train a pack and store its results, from where its last checkpoint is; nothing if another process does.

    `checkpoints` are the job's own, for a caller that may have to stop them.
    """
    with _owned(job.lock_file) as is_owner:
        if not is_owner:
            return Elsewhere(job.pack.id)
        done = finished(job)  # by another process, since this job was planned
        return done or _train(job, checkpoints or job.checkpoints)


def finished(job: Job) -> Finished | None:
    """What the store says of the job's pack, once it is complete."""
    try:
        attributes = read_pack_attrs(job.out, job.pack.id)
    except KeyError:
        return None
    if not attributes["complete"]:
        return None
    idle = sum(
        trial["fault"]["kind"] != "none" and not changes
        for trial, changes in zip(attributes["trials"], attributes["changes"], strict=True)
    )
    return Finished(job.pack.id, tuple(attributes["outcome"]), idle)


@contextlib.contextmanager
def _owned(file: Path) -> Iterator[bool]:
    """Whether the file is locked for this process. The lock ends with the process, however that ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            warnings.warn(f"{file}: locks do not work here ({error}); let one command at a time train", stacklevel=4)
        try:
            yield True
        finally:
            file.unlink(missing_ok=True)  # whoever locks the new one finds the pack complete, or its trace


def begun_packs(out: Path, wanted: Set[str]) -> list[PackPlan]:
    """The packs that have a checkpoint and train none but `wanted` trials: as they are, they can go on from there."""
    found: list[PackPlan] = []
    taken: set[str] = set()
    for folder in sorted((out / CHECKPOINTS).glob("*")):
        values = about(folder)
        with contextlib.suppress(ConfigError):  # a config of another version
            trials = tuple(trial_from_dict(own, fault_types()) for own in (values or {}).get("trials", ()))
            pack = PackPlan(trials, frozenset(values["witnesses"] if values else ()))
            ids = {trial.id for trial in pack.recorded}
            if ids and ids <= wanted and not ids & taken:
                found.append(pack)
                taken |= ids
    return found


def _train(job: Job, checkpoints: Checkpoints) -> Finished:
    trials, recorded = job.pack.trials, job.pack.recorded
    first = trials[0]
    device = pick_device(job.device, first.train.precision)
    make_deterministic(device)
    corpus = corpus_of(without_order(first.data), first.model.context)
    agenda = Agenda([injector_of(trial, corpus) for trial in trials])
    pack = Pack(trials, corpus, device, agenda.first)
    description = {**corpus.description, "fingerprint": corpus.fingerprint}
    saved = checkpoints.newest()
    store = PackStore.resume(job.out, job.pack.id, saved.step) if saved else None
    if store is None:
        saved = None
        checkpoints.remove()
        store = PackStore.create(
            job.out,
            job.pack.id,
            recorded,
            first.steps,
            first.model.depth,
            description,
            _environment(device),
            job.block,
        )
    kept = [i for i, trial in enumerate(trials) if trial.id not in job.pack.witnesses]

    def write(first_step: int, signals: Mapping[str, np.ndarray]) -> None:
        store.write(first_step, {name: values[kept] for name, values in signals.items()})

    def progress(steps: int, frozen: int) -> None:
        _report(job, steps, frozen)

    progress(saved.step if saved else 0, 0)
    try:
        result = train(pack, agenda, store.block, write, progress, checkpoints=checkpoints, saved=saved)
    except Exception:
        if saved and checkpoints.latest == saved.step:  # perhaps it is the checkpoint: the next attempt begins anew
            checkpoints.remove()
        raise
    ended = {name: [values[i] for i in kept] for name, values in vars(result).items()}
    events = [[event.to_dict() for event in own] for own in ended.pop("events")]
    job.error_file.unlink(missing_ok=True)  # before the pack counts as complete: a kill in between leaves no old trace
    store.finish(**ended, faults=events)
    checkpoints.remove()
    job.progress_file.unlink(missing_ok=True)
    return Finished(job.pack.id, tuple(ended["outcome"]), _idle_faults(trials, result, kept))


def train_pack_safely(job: Job, checkpoints: Checkpoints | None = None) -> Finished | Failed | Elsewhere:
    """`train_pack`, with a crash kept as a trace in the results folder."""
    try:
        return train_pack(job, checkpoints)
    except Stopped:
        raise
    except Exception as error:
        return record_failure(job, f"{type(error).__name__}: {error}", traceback.format_exc())


def record_failure(job: Job, reason: str, trace: str) -> Failed:
    """Leave the trace of a crashed pack, and the trials that were in it, in the results folder, if that takes it."""
    trials = "\n".join(json.dumps({"id": trial.id, **trial.to_dict()}) for trial in job.pack.trials)
    first = reason.splitlines()[0]
    try:
        _replace(job.error_file, f"{reason}\n\n{trace}\n\ntrials of this pack:\n{trials}\n")
        job.progress_file.unlink(missing_ok=True)
    except OSError as error:
        first += f" (its trace could not be written: {error.strerror})"
    return Failed(job.pack.id, first, job.error_file)


def without_order(data: Data) -> Data:
    """The same corpus whatever the order of batches."""
    return Data(**{**vars(data), "seed": None})


def write_plan(out: Path, trials: Iterable[str]) -> None:
    """Keep what was asked for, for those who ask how far it is."""
    _replace(out / PLAN, json.dumps({"trials": sorted(trials)}))


def _replace(file: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())


def _idle_faults(trials: tuple[Trial, ...], result: Result, kept: list[int]) -> int:
    faulty = [i for i in kept if isinstance(trials[i].fault, InjectableFault)]
    return sum(not result.changes[i] for i in faulty)


def _report(job: Job, steps: int, frozen: int) -> None:
    """One small file a running pack: the same for processes here and for jobs on Slurm. It is for people alone."""
    trials = job.pack.trials
    values = {"steps": steps, "of": trials[0].steps, "trials": len(trials), "frozen": frozen, "time": time.time()}
    with contextlib.suppress(OSError):
        _replace(job.progress_file, json.dumps(values))


def _environment(device: torch.device) -> dict[str, str | int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
    }
