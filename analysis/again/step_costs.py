"""What a step of one stored recipe takes against a step of another: time by turns in one process, memory, storage."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.again.batches import BatchReader
from harness.config import ConfigError, Trial
from harness.loop.loop import train
from harness.memory.footprint import footprint
from harness.model.determinism import make_deterministic, settings_kept
from harness.model.precision import pick_device
from harness.storage.sealed import write_sealed
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule

BLOCK = 50
WARM, STEPS = 2, 8  # of each in a round: those in which caches fill, and those that are timed
NEVER = 10**9
WRITES = 3  # of a checkpoint, of which the median is told


@dataclass(frozen=True)
class RecipeCost:
    """Of one run by itself: seconds of a step by round [rounds], bytes at its peak on a GPU as planned, and of a state.

    `write` is how long a checkpoint takes to be written to a temporary folder, in seconds.
    """

    seconds: np.ndarray
    memory: int
    state: int
    write: float


@settings_kept()
def recipe_costs(
    own: BatchReader, base: BatchReader, rounds: int, device: str = "auto"
) -> tuple[RecipeCost, RecipeCost]:
    """Train a few steps of two stored recipes by turns, from the middle of their runs on, without their faults.

    Each round begins both anew, so that neither learns. Raises ConfigError for one that cannot be trained again, for
    runs that are too short, and for a `device` (auto, cpu, cuda) that there is not.
    """
    where = pick_device(device, own.trial.train.precision)
    make_deterministic(where)
    readings = own.clean, base.clean
    seconds = np.zeros((2, rounds))
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        for place in order:
            seconds[place, number] = _seconds(readings[place], where)
    one, other = (
        RecipeCost(seconds[place], footprint(reading.trial).bytes(1), *_stored(reading, where))
        for place, reading in enumerate(readings)
    )
    return one, other


def _seconds(reading: BatchReader, device: torch.device) -> float:
    """Of one step, of a pack of one."""
    trial = reading.trial
    middle = trial.steps // 2
    until = min(middle + WARM + STEPS, trial.steps)
    if until < middle + WARM + 1:
        raise ConfigError(f"TRIAL={trial.id}: train.steps={trial.steps}: too short; allowed: {2 * WARM + 2} or more")
    pack = _pack(reading, device)
    pack.row_steps.on_device.fill_(middle)
    pack.row_steps.read()
    marks: dict[int, float] = {}

    def mark(done: int, frozen: int) -> None:
        if done in (middle + WARM, until):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            marks[done] = time.perf_counter()

    train(pack, FaultSchedule([None]), BLOCK, lambda first_step, signals: None, mark, until=until)
    if len(marks) < 2:
        raise ConfigError(f"TRIAL={trial.id}: is not finite any more after a few steps; allowed: one that is")
    return (marks[until] - marks[middle + WARM]) / (until - middle - WARM)


def _pack(reading: BatchReader, device: torch.device) -> Pack:
    trial = reading.trial
    if trial.model.start is not None:
        why = "begins with weights of a file, which is not opened unasked"
        raise ConfigError(f"TRIAL={trial.id}: {why}; allowed: one that begins with its own, or --rounds 0")
    try:
        return Pack([_never_validated(trial)], reading.corpus, device)
    except (ValueError, KeyError, TypeError, RuntimeError, AssertionError) as error:
        reason = f"cannot be trained again ({type(error).__name__}: {str(error)!r:.80})"
        raise ConfigError(f"TRIAL={trial.id}: {reason}; allowed: a trial of this version's") from None


def _never_validated(trial: Trial) -> Trial:
    return replace(trial, train=replace(trial.train, validate_every=NEVER))


def _stored(reading: BatchReader, device: torch.device) -> tuple[int, float]:
    """Bytes of a run's state, and the median of the seconds that it takes to write it."""
    tensors: dict[str, Tensor] = {}
    _collect(_pack(reading, device).whole_state(), "", tensors)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(WRITES):
            started = time.perf_counter()
            write_sealed(Path(folder) / f"{number}.safetensors", tensors, {}, 1)
            seconds.append(time.perf_counter() - started)
    return sum(x.numel() * x.element_size() for x in tensors.values()), float(np.median(seconds))


def _collect(value: Any, name: str, tensors: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors[name] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{name}.{key}", tensors)
