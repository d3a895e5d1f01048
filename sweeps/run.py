"""Train one pack from its plan to its place in the store. This is what every kind of worker calls."""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from harness.config import Data, Trial
from harness.corpus import Corpus, load_corpus
from harness.loop import Result, train
from harness.pack import Pack
from harness.precision import make_deterministic, pick_device
from harness.schedules import rates_of
from harness.sites import Agenda, Injector
from harness.store import PackStore
from injectors import FaultContext, InjectableFault
from injectors.fault import places_of
from sweeps.planner import PackPlan

PROGRESS, ERRORS = "progress", "errors"


@dataclass(frozen=True)
class Job:
    """A pack and where it goes. Travels to worker processes and to Slurm."""

    pack: PackPlan
    out: Path
    device: str
    block: int

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


def train_pack(job: Job) -> Finished:
    """Train a pack and store its results."""
    trials, recorded = job.pack.trials, job.pack.recorded
    first = trials[0]
    device = pick_device(job.device, first.train.precision)
    make_deterministic(device)
    corpus = corpus_of(without_order(first.data), first.model.context)
    agenda = Agenda([injector_of(trial, corpus) for trial in trials])
    pack = Pack(trials, corpus, device, agenda.first)
    description = {**corpus.description, "fingerprint": corpus.fingerprint}
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

    progress(0, 0)
    result = train(pack, agenda, job.block, write, progress)
    ended = {name: [values[i] for i in kept] for name, values in vars(result).items()}
    events = [[event.to_dict() for event in own] for own in ended.pop("events")]
    job.error_file.unlink(missing_ok=True)  # before the pack counts as complete: a kill in between leaves no old trace
    store.finish(**ended, faults=events)
    job.progress_file.unlink(missing_ok=True)
    return Finished(job.pack.id, tuple(ended["outcome"]), _idle_faults(trials, result, kept))


def train_pack_safely(job: Job) -> Finished | Failed:
    """`train_pack`, with a crash kept as a trace in the results folder."""
    try:
        return train_pack(job)
    except Exception as error:
        return record_failure(job, f"{type(error).__name__}: {error}", traceback.format_exc())


def record_failure(job: Job, reason: str, trace: str) -> Failed:
    """Leave the trace of a crashed pack, and the trials that were in it, in the results folder."""
    job.error_file.parent.mkdir(parents=True, exist_ok=True)
    trials = "\n".join(json.dumps({"id": trial.id, **trial.to_dict()}) for trial in job.pack.trials)
    job.error_file.write_text(f"{reason}\n\n{trace}\n\ntrials of this pack:\n{trials}\n")
    job.progress_file.unlink(missing_ok=True)
    return Failed(job.pack.id, reason.splitlines()[0], job.error_file)


def without_order(data: Data) -> Data:
    """The same corpus whatever the order of batches."""
    return Data(**{**vars(data), "seed": None})


def _idle_faults(trials: tuple[Trial, ...], result: Result, kept: list[int]) -> int:
    faulty = [i for i in kept if isinstance(trials[i].fault, InjectableFault)]
    return sum(not result.changes[i] for i in faulty)


def _report(job: Job, steps: int, frozen: int) -> None:
    """One small file a running pack: the same for processes here and for jobs on Slurm."""
    trials = job.pack.trials
    values = {"steps": steps, "of": trials[0].steps, "trials": len(trials), "frozen": frozen, "time": time.time()}
    job.progress_file.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.progress_file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(values))
    os.replace(temporary, job.progress_file)


def _environment(device: torch.device) -> dict[str, str | int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
    }
