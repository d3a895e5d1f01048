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
import json
import platform
import traceback
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from harness.checkpoint import Checkpoints, Stopped, about
from harness.config import ConfigError, Data, Trial, trial_from_dict
from harness.corpus import Corpus, load_corpus
from harness.distributed import Group, Unsaved
from harness.loop import Result, train
from harness.pack import Pack
from harness.precision import make_deterministic, pick_device
from harness.schedules import rates_of
from harness.sites import Agenda, Injector
from harness.store import PackStore, read_pack_attrs
from harness.zarr_files import write_atomically
from injectors import FaultContext, InjectableFault, fault_types
from injectors.fault import places_of
from sweeps.locks import owned
from sweeps.planner import PackPlan
from sweeps.processes import RankKilled, ranks, share_of_threads

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
    ranks: str = "simulated"

    @property
    def processes(self) -> int:
        """How many processes train it at the same time."""
        return self.pack.trials[0].train.ranks if self.ranks == "processes" else 1

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
    with owned(job.lock_file) as is_owner:
        if not is_owner:
            return Elsewhere(job.pack.id)
        done = finished(job)  # by another process, since this job was planned
        if done:
            return done
        with share_of_threads(job.processes):
            return _train(job, checkpoints or job.checkpoints)


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
    pack, agenda, corpus = _prepared(job, device)
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
            _environment(device) | ({"processes": job.processes} if job.processes > 1 else {}),
            job.block,
        )
    kept = [i for i, trial in enumerate(trials) if trial.id not in job.pack.witnesses]

    def write(first_step: int, signals: Mapping[str, np.ndarray]) -> None:
        store.write(first_step, {name: values[kept] for name, values in signals.items()})

    begun = saved.step if saved else 0

    def progress(steps: int, frozen: int) -> None:
        _report(job, begun, steps, frozen)

    progress(begun, 0)
    try:
        with _all_ranks(job, pack, store.block, saved is not None):
            result = train(pack, agenda, store.block, write, progress, checkpoints=checkpoints, saved=saved)
    except RankKilled:  # the checkpoint is as good as before
        raise
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


def _prepared(job: Job, device: torch.device) -> tuple[Pack, Agenda, Corpus]:
    """The pack as it is before its first step, and its faults."""
    make_deterministic(device)
    trials = job.pack.trials
    corpus = corpus_of(without_order(trials[0].data), trials[0].model.context)
    agenda = Agenda([injector_of(trial, corpus) for trial in trials])
    return Pack(trials, corpus, device, agenda.first), agenda, corpus


@contextlib.contextmanager
def _all_ranks(job: Job, pack: Pack, block: int, is_resumed: bool) -> Iterator[None]:
    """Have the pack's other ranks trained by other processes meanwhile, if the job wants that."""
    if job.processes == 1:
        yield
        return
    with ranks(job.processes, pack.device, _follow, (job, block, is_resumed)) as group:
        pack.spread_over(group)
        yield


def _follow(group: Group, job: Job, block: int, is_resumed: bool) -> None:
    """What another rank's process does: the same training, of which it keeps nothing."""
    pack, agenda, _ = _prepared(job, group.device)
    pack.spread_over(group)
    saved = job.checkpoints.newest() if is_resumed else None
    checkpoints = Unsaved(job.checkpoints.folder)
    train(pack, agenda, block, lambda first_step, signals: None, checkpoints=checkpoints, saved=saved)


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


def _report(job: Job, begun: int, steps: int, frozen: int) -> None:
    """One small file a running pack: the same for processes here and for jobs on Slurm. It is for people alone."""
    trials = job.pack.trials
    values = {"begun": begun, "steps": steps, "of": trials[0].steps, "trials": len(trials), "frozen": frozen}
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
