"""Train one pack from its plan to its place in the store. This is what every kind of worker calls.

Beside the store:

    <out>/progress/<pack>.json      how far a pack in training is
    <out>/checkpoints/<pack>/       its state: `harness/storage/checkpoint.py`; gone once it is complete
    <out>/locks/, <out>/claims/     who trains what: `sweeps/running/ledger.py`
    <out>/errors/<pack>.txt         the trace of one that crashed
    <out>/weights/                  the last weights of its trials: `harness/storage/last_weights.py`
    <out>/states/                   its state near its end: `harness/storage/kept_states.py`
    <out>/plan.json                 the trials that the last command that had any to train asked for
"""

from __future__ import annotations

import contextlib
import json
import traceback
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.basics.cpu_kernels import cpu_kernels, kernels_changed
from harness.basics.devices import on_cpu
from harness.basics.environment import environment_of
from harness.config import ConfigError, Data, trial_from_dict
from harness.data.corpus import Corpus, load_corpus
from harness.faults.fault import InjectableFault, injector_of
from harness.kernels.use import version
from harness.loop.graphs import recordings
from harness.loop.loop import train
from harness.loop.resume import steps_done
from harness.model.determinism import make_deterministic
from harness.model.precision import pick_device
from harness.model.start import start_digests
from harness.storage.checkpoint import Checkpoints, Saved, Stopped, about
from harness.storage.kept_states import STATES, StateKeeper
from harness.storage.last_weights import write_weights
from harness.storage.pack_info import KERNELS_CHANGED, NOT_RECORDED
from harness.storage.progress_files import ERRORS, PROGRESS, ProgressFile
from harness.storage.results_folder import MARKER, FolderLost, ResultsPath
from harness.storage.store import SIGNALS, PackStore, Signal
from harness.storage.stored import STORE, read_pack
from harness.training.distributed import RankGroup, Unsaved
from harness.training.longer import goes_on_from
from harness.training.pack import Pack
from harness.training.readings import stored_signals
from harness.training.sites import FaultSchedule
from injectors import fault_types
from sweeps.compose.settings import RunSettings
from sweeps.planning.packs import PackPlan
from sweeps.running.calibration import AT_ONCE, fastest_rows, kept_rows
from sweeps.running.ledger import claimed, claims_on
from sweeps.running.processes import RankKilled, ranks, share_of_threads

CHECKPOINTS = "checkpoints"
ATTEMPTS = 3  # at a pack whose chunks are found damaged when it is trained


@dataclass(frozen=True)
class Job:
    """A pack, and the run that it belongs to. Travels to worker processes and to Slurm."""

    pack: PackPlan
    run: RunSettings
    folder_id: str = ""  # of the results folder for which it was planned; of any, if there is none

    @property
    def out(self) -> Path:
        return self.run.out

    @property
    def folder(self) -> ResultsPath:
        """The results folder. Raises FolderLost if it is gone, or another one stands in its place."""
        place = ResultsPath.at(self.out)
        if not (place / MARKER).exists():
            raise place.lost()
        folder = ResultsPath.open(self.out)
        if self.folder_id and folder.id != self.folder_id:
            raise folder.lost()
        return folder

    @property
    def processes(self) -> int:
        """How many processes train it at the same time."""
        return self.pack.trials[0].train.ranks if self.run.ranks == "processes" else 1

    @property
    def checkpoints(self) -> Checkpoints:
        often = self.run.checkpoint
        seconds = None if often.minutes is None else 60 * often.minutes
        return Checkpoints(self.folder / CHECKPOINTS / self.pack.id, often.every, seconds, self.pack.to_dict())

    @property
    def progress_file(self) -> ResultsPath:
        return self.folder / PROGRESS / f"{self.pack.id}.json"

    @property
    def error_file(self) -> ResultsPath:
        return self.folder / ERRORS / f"{self.pack.id}.txt"


@dataclass(frozen=True)
class Finished:
    """What the parent process needs to know of a trained pack."""

    pack: str
    outcome: tuple[str, ...]
    idle_faults: int  # trials whose fault never fired, or changed nothing


@dataclass(frozen=True)
class Failed:
    """A pack that crashed; its trace is in `trace`, or, if that could not be written, nowhere."""

    pack: str
    reason: str
    trace: Path | None

    @property
    def message(self) -> str:
        """The reason, and where to read on."""
        return f"{self.reason}; trace in {self.trace}" if self.trace else self.reason


@dataclass(frozen=True)
class Elsewhere:
    """A pack that another process trains at this moment."""

    pack: str


Ended = Finished | Failed | Elsewhere  # what became of a pack

corpus_of = lru_cache(maxsize=4)(load_corpus)  # read once a process


def train_pack(job: Job, checkpoints: Checkpoints | None = None) -> Finished | Elsewhere:
    """Train a pack and store its results, from where its last checkpoint is; less what another process has or trains.

    `checkpoints` are the job's own, for a caller that may have to stop them. Raises FolderLost if the results folder is
    moved or removed meanwhile.
    """
    folder = job.folder
    with claimed(folder, job.pack) as left:
        if left is None:
            return finished(job) or Elsewhere(job.pack.id)
        part = replace(job, pack=left)
        done = finished(part)  # by another process, since this job was planned
        if done:
            return replace(done, pack=job.pack.id)
        checkpoints = checkpoints or job.checkpoints
        checkpoints.folder, checkpoints.about = folder / CHECKPOINTS / left.id, left.to_dict()
        with share_of_threads(job.processes, job.run.cpu.threads):
            return replace(_train(part, checkpoints), pack=job.pack.id)


def finished(job: Job) -> Finished | None:
    """What the store says of the job's pack, once it is complete, or its trials are in other packs that are."""
    wanted = {trial.id for trial in job.pack.recorded}
    packs = [read_pack(ResultsPath.at(job.out) / STORE / job.pack.id)]
    if packs[0] is None or not packs[0].complete:
        folder = job.folder
        others = dict.fromkeys(claim.pack for claim in claims_on(folder, wanted))
        packs = [read_pack(folder / STORE / name) for name in others]
    outcome: dict[str, str] = {}
    idle: set[str] = set()
    for pack in packs:
        if pack is None or not pack.complete:
            continue
        lists = (pack.attributes[name] for name in ("ids", "outcome", "trials", "changes"))
        for trial, ended, config, changes in zip(*lists, strict=True):
            if trial in wanted:
                outcome[trial] = ended
                if config["fault"]["kind"] != "none" and not changes:
                    idle.add(trial)
    return Finished(job.pack.id, tuple(outcome.values()), len(idle)) if wanted <= outcome.keys() else None


def begun_packs(out: Path, wanted: Set[str]) -> list[PackPlan]:
    """The packs that have a checkpoint and train none but `wanted` trials: as they are, they can go on from there."""
    packs: list[PackPlan] = []
    taken: set[str] = set()
    for folder in (ResultsPath.at(out) / CHECKPOINTS).entries():
        values = about(folder) or {}
        with contextlib.suppress(ConfigError, TypeError, KeyError, AttributeError):  # of another version, or damaged
            trials = tuple(trial_from_dict(config, fault_types()) for config in values["trials"])
            pack = PackPlan(trials, frozenset(values["witnesses"]))
            ids = {trial.id for trial in pack.recorded}
            if ids and ids <= wanted and not ids & taken:
                packs.append(pack)
                taken |= ids
    return packs


def _train(job: Job, checkpoints: Checkpoints) -> Finished:
    """Train the pack and have it complete, once every chunk of it is on the disk as it was written."""
    damage = ""
    for _ in range(ATTEMPTS):
        store, ended = _attempt(job, checkpoints)
        damaged = store.damage()
        if damaged is None:
            break
        _, damage = damaged
        warnings.warn(f"{damage}; what its pack has trained since is trained again", stacklevel=2)
    else:
        raise OSError(f"{damage}, after {ATTEMPTS} attempts: the disk does not keep what is written to it")
    events = [[event.to_dict() for event in of_trial] for of_trial in ended.pop("events")]
    job.error_file.unlink()  # before the pack counts as complete: a kill in between leaves no old trace
    store.finish(**ended, faults=events)
    checkpoints.remove()
    job.progress_file.unlink()
    idle = sum(
        isinstance(trial.fault, InjectableFault) and not changes
        for trial, changes in zip(job.pack.recorded, ended["changes"], strict=True)
    )
    return Finished(job.pack.id, tuple(ended["outcome"]), idle)


def _attempt(job: Job, checkpoints: Checkpoints) -> tuple[PackStore, dict[str, list[Any]]]:
    """Train from the newest checkpoint to the last step. Returns what is left to write of the recorded trials."""
    trials, first = job.pack.trials, job.pack.trials[0]
    progress = ProgressFile(job.progress_file, first.steps, len(trials))
    progress.begin(0)
    device = pick_device(job.run.device, first.train.precision)
    pack, fault_schedule, corpus = _prepared(job, device)
    store, saved = _opened(job, pack, corpus, checkpoints)
    kept = [i for i, trial in enumerate(trials) if trial.id not in job.pack.unstored]

    def write(first_step: int, signals: Mapping[str, np.ndarray]) -> None:
        store.write(first_step, {name: values[kept] for name, values in signals.items()})

    def leave(number: int, tensors: Mapping[str, Tensor]) -> None:
        if trials[number].id not in job.pack.unstored:
            write_weights(job.folder, trials[number], tensors)

    def not_recorded(said: str) -> None:
        warnings.warn(said, stacklevel=2)
        store.note(NOT_RECORDED, said)

    progress.begin(steps_done(saved) if saved else 0)
    try:
        with _all_ranks(job, pack, store.block, saved is not None):
            asked = leave if job.run.keep != "nothing" else None
            result = train(
                pack,
                fault_schedule,
                store.block,
                write,
                progress,
                checkpoints=checkpoints,
                saved=saved,
                leave=asked,
                provenance=job.run.telemetry.provenance,
                record=recordings(device),
                not_recorded=not_recorded,
                states=_states(job),
                bystanders=_bystanders(job.pack),
            )
    except Stopped as stop:
        progress.stopped(stop.step)
        raise
    except (RankKilled, FolderLost):  # the checkpoint is as good as before
        raise
    except Exception:
        if saved and checkpoints.latest == saved.step:  # perhaps it is the checkpoint: the next attempt begins anew
            checkpoints.remove()
        raise
    store.write_ends({name: values[kept] for name, values in result.ends.items()})
    return store, {name: [values[i] for i in kept] for name, values in vars(result).items() if name != "ends"}


def _states(job: Job) -> StateKeeper | None:
    """What keeps the pack's state where a longer run could go on from, if that is asked for."""
    if job.run.keep != "state":
        return None
    steps = {step for trial in job.pack.recorded if (step := goes_on_from(trial)) is not None}
    if not steps:
        return None
    ids = [trial.id for trial in job.pack.trials]
    return StateKeeper(job.folder / STATES / job.pack.id, steps, {**job.pack.to_dict(), "ids": ids})


def _bystanders(pack: PackPlan) -> set[int]:
    """The numbers of trials that are neither recorded nor a recorded one's golden twin."""
    needed = {trial.id for trial in pack.recorded} | {trial.golden.id for trial in pack.recorded}
    return {number for number, trial in enumerate(pack.trials) if trial.id not in needed}


def _opened(job: Job, pack: Pack, corpus: Corpus, checkpoints: Checkpoints) -> tuple[PackStore, Saved | None]:
    """The pack's store, a new one or with what was stored before the newest checkpoint; and that checkpoint."""
    folder, first = job.folder, job.pack.trials[0]
    while saved := checkpoints.newest():
        if store := PackStore.resume(folder, job.pack.id, steps_done(saved)):
            if changed := kernels_changed(store.attributes["environment"], steps_done(saved)):
                warnings.warn(f"pack {job.pack.id}: {changed}", stacklevel=2)
                store.note(KERNELS_CHANGED, changed)
            _check_same_state(job, pack, store, saved)
            return store, saved
        checkpoints.drop(saved.step)
    checkpoints.remove()
    text = {**corpus.description, "fingerprint": corpus.fingerprint}
    environment, block, signals = _environment(pack, job), job.run.telemetry.block, _signals(pack)
    shape = first.steps, first.model.depth
    return PackStore.create(folder, job.pack.id, job.pack.recorded, *shape, text, environment, block, signals), None


def _check_same_state(job: Job, pack: Pack, store: PackStore, saved: Saved) -> None:
    """Raises ConfigError for a checkpoint of a version that measures or keeps other things; it stays as it is."""
    lacking = {name for name, _ in pack.rows_state if f"pack.{name}" not in saved.tensors}
    others = (store.signals.keys() ^ (SIGNALS | _signals(pack)).keys()) | lacking
    if others:
        named = ", ".join(sorted(others)[:5])
        why = f"its checkpoint at step {saved.step} is of another version, which differs in {named}"
        commit = store.attributes["environment"].get("commit", "unknown")
        allowed = f"that version (commit {commit}), or without {job.out / CHECKPOINTS / job.pack.id}, to begin anew"
        raise ConfigError(f"pack {job.pack.id}: {why}; allowed: {allowed}")


def _environment(pack: Pack, job: Job) -> dict[str, Any]:
    """That of a pack; `starts`: the SHA-256 of the files of `model.start`."""
    found = environment_of(pack.device, job.processes)
    if starts := start_digests(job.pack.trials):
        found["starts"] = starts
    return found if on_cpu(pack.device) else {**found, AT_ONCE: pack.at_once, "triton": version(pack.device)}


def _signals(pack: Pack) -> dict[str, Signal]:
    """What is stored of each step of a pack."""
    guards = {name: Signal(("trial", "step"), of.units, of.long_name) for name, of in pack.guard_signals.items()}
    return {**guards, **stored_signals(pack.planned[0]), "loss": Signal(("trial", "step"), *pack.objective.reported)}


def _prepared(job: Job, device: torch.device, at_once: int | None = None) -> tuple[Pack, FaultSchedule, Corpus]:
    """The pack as it is before its first step, and its faults. `at_once`: as in another of its processes."""
    make_deterministic(device)
    if on_cpu(device):
        cpu_kernels(job.run.cpu.kernels)
    trials = job.pack.trials
    corpus = corpus_of(without_order(trials[0].data), trials[0].model.context)
    fault_schedule = FaultSchedule([injector_of(trial, corpus) for trial in trials])
    if at_once is None and job.run.pack_size is None and not on_cpu(device):
        at_once = kept_rows(job.folder / STORE / job.pack.id) or fastest_rows(trials, device, corpus)
    return Pack(trials, corpus, device, fault_schedule.first, at_once), fault_schedule, corpus


@contextlib.contextmanager
def _all_ranks(job: Job, pack: Pack, block: int, is_resumed: bool) -> Iterator[None]:
    """Have the pack's other ranks trained by other processes meanwhile, if the job wants that."""
    if job.processes == 1:
        yield
        return
    with ranks(job.processes, pack.device, _follow, (job, block, is_resumed, pack.at_once)) as group:
        pack.spread_over(group)
        yield


def _follow(group: RankGroup, job: Job, block: int, is_resumed: bool, at_once: int) -> None:
    """What another rank's process does: the same training, of which it keeps nothing."""
    pack, fault_schedule, _ = _prepared(job, group.device, at_once)
    pack.spread_over(group)
    same: dict[str, Any] = {"saved": job.checkpoints.newest() if is_resumed else None}
    same |= {"checkpoints": Unsaved(job.checkpoints.folder), "provenance": job.run.telemetry.provenance}
    train(pack, fault_schedule, block, lambda first_step, signals: None, **same)


def train_pack_safely(job: Job, checkpoints: Checkpoints | None = None) -> Ended:
    """`train_pack`, with a crash kept as a trace in the results folder."""
    try:
        return train_pack(job, checkpoints)
    except (Stopped, FolderLost):
        raise
    except Exception as error:
        return record_failure(job, f"{type(error).__name__}: {error}", traceback.format_exc())


def record_failure(job: Job, reason: str, trace: str) -> Failed:
    """Leave the trace of a crashed pack, and the trials that were in it, in the results folder, if that takes it."""
    trials = "\n".join(json.dumps({"id": trial.id, **trial.to_dict()}) for trial in job.pack.trials)
    first = (reason.splitlines() or [""])[0]
    try:
        job.error_file.parent.make_folder()
        job.error_file.write(f"{reason}\n\n{trace}\n\ntrials of this pack:\n{trials}\n".encode())
        job.progress_file.unlink()
    except (OSError, ConfigError, FolderLost) as error:
        why = getattr(error, "strerror", None) or error
        return Failed(job.pack.id, f"{first} (its trace could not be written: {why})", None)
    return Failed(job.pack.id, first, job.out / ERRORS / f"{job.pack.id}.txt")


def without_order(data: Data) -> Data:
    """The same corpus whatever the order of batches."""
    return Data(**{**vars(data), "seed": None})
