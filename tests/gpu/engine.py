"""Packs as the checks train them, through the loop that sweeps use; nothing here needs more than torch and numpy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import CORE, Data, Trial, sections
from harness.data.corpus import Corpus, load_corpus
from harness.faults.fault import injector_of as arm
from harness.loop.graphs import Recording, recordings
from harness.loop.loop import Result, train
from harness.training.blocks import Found
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule, Injector
from tests.gpu.bench import Bench

TIMES = ("tokens_per_second", "step_seconds")
SHORTEST = {"validate_every": 10**6, "validate_tokens": 1, "validate_between": 1}  # validation that hardly counts


def trial_of(**fields: Any) -> Trial:
    """A trial by short names: `width=64`, `lr=1e-2`; what has a section of its own is a mapping, or an object."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in CORE}
    identity = {name: fields.pop(name) for name in ("fault", "seed") if name in fields}
    brought: dict[str, Any] = {}
    for name, value in fields.items():
        if name in sections():
            brought[name] = sections()[name](**value) if isinstance(value, Mapping) else value
        else:
            (part,) = [part for part, cls in CORE.items() if name in cls.__dataclass_fields__]
            parts[part][name] = value
    return Trial.of({name: cls(**parts[name]) for name, cls in CORE.items()} | brought, **identity)


def small(bench: Bench, **fields: Any) -> dict[str, Any]:
    """A shape for the checks of bits: the benchmark's on the day, a few numbers in a dry run."""
    usual = {"width": 64, "depth": 2, "head_dim": 16, "context": 64, "batch": 8, "warmup": 5}
    tiny = {"width": 16, "depth": 1, "head_dim": 8, "context": 8, "batch": 2, "warmup": 1}
    tiny |= {"source": "zipf", "vocabulary": 64, "length": 20_000}
    fields = fields | ({name: tiny[name] for name in fields if name in tiny} if bench.is_dry else {})
    return {**bench.pick(usual, tiny), **SHORTEST, **fields}


@lru_cache
def _corpus(data: Data) -> Corpus:
    return load_corpus(data, context=1024 if data.length > 50_000 else 64)


def corpus_of(trial: Trial) -> Corpus:
    return _corpus(replace(trial.data, seed=None))


def pack_of(trials: Sequence[Trial], device: torch.device, begins: Sequence[int | None] | None = None) -> Pack:
    return Pack(trials, corpus_of(trials[0]), device, begins)


def injector_of(trial: Trial) -> Injector | None:
    """The trial's fault, armed as a sweep arms it."""
    return arm(trial, corpus_of(trial))


@dataclass(frozen=True)
class Trained:
    """What a pack left, by planned trial: signals [R, steps, ...], last weights [P] on the host. So many steps, and
    pieces of validation, were replayed.
    """

    pack: Pack
    result: Result
    signals: dict[str, np.ndarray]
    weights: dict[int, Tensor]
    steps: int
    pieces: int

    def left_by(self, number: int, steps: slice = slice(None)) -> dict[str, Tensor]:
        """All that a trial left but times; with `steps` its signals of these alone."""
        left = {name: torch.from_numpy(x[number][steps]) for name, x in self.signals.items() if name not in TIMES}
        if steps == slice(None):
            left |= {name: torch.from_numpy(x[number]) for name, x in self.result.ends.items()}
            left["weights"] = self.weights[number]
        return left


def train_pack(
    pack: Pack,
    injectors: Mapping[int, Injector | None] | None = None,
    fault_schedule: FaultSchedule | None = None,
    block: int = 50,
    graphs: bool = True,
    **options: Any,
) -> Trained:
    """Train a pack to its end; on CUDA with healthy steps and validation as `graphs`, as sweeps do, or without."""
    make, replays = recordings(pack.device) if graphs else None, Counter[type]()
    numbers = range(len(pack.planned))
    fault_schedule = fault_schedule or FaultSchedule(
        [(injectors or {}).get(number, injector_of(pack.planned[number])) for number in numbers]
    )
    blocks: dict[int, Mapping[str, np.ndarray]] = {}
    weights: dict[int, Tensor] = {}

    def leave(number: int, tensors: Mapping[str, Tensor]) -> None:
        weights[number] = torch.cat([tensors[name].detach().reshape(-1).cpu() for name in sorted(tensors)])

    result = train(
        pack, fault_schedule, block, blocks.__setitem__, leave=leave, record=counted(make, replays), **options
    )
    names = blocks[max(blocks)]
    signals = {name: np.concatenate([blocks[first][name] for first in sorted(blocks)], axis=1) for name in names}
    return Trained(pack, result, signals, weights, replays[Found], replays[Tensor])


def counted(make: Callable[[], Recording] | None, replays: Counter[type]) -> Callable[[], Recording] | None:
    """Makes the same recordings, whose replays are counted by the type of what they find."""

    class Counted:
        def __init__(self) -> None:
            assert make is not None
            self._recording = make()

        def record(self, function: Callable[[], Any]) -> Any:
            found = self._recording.record(function)
            self._type = type(found)
            return found

        def replay(self) -> None:
            replays[self._type] += 1
            self._recording.replay()

    return None if make is None else Counted


def run(bench: Bench, trials: Sequence[Trial], forks: bool = False, **options: Any) -> Trained:
    """Train these trials as a pack; with `forks` faulty ones share their twin's row until their fault begins."""
    fault_schedule = FaultSchedule([injector_of(trial) for trial in trials])
    pack = pack_of(trials, bench.device, fault_schedule.first if forks else None)
    return train_pack(pack, fault_schedule=fault_schedule, **options)


@dataclass
class Window:
    """Follows `train` as its `progress`; calls `begin` and `end` after these steps, once the device has done all."""

    bench: Bench
    first: int
    last: int
    begin: Callable[[], Any] = lambda: None
    end: Callable[[], Any] = lambda: None
    seconds: float = 0.0

    def __call__(self, done: int, frozen: int) -> None:
        if done == self.first:
            self.bench.wait()
            self.begin()
            self._started = time.perf_counter()
        elif done == self.last:
            self.bench.wait()
            self.seconds = time.perf_counter() - self._started
            self.end()


def step_seconds(bench: Bench, trials: Sequence[Trial], first: int, last: int, **options: Any) -> float:
    """Of a step of these trials as a pack, from after step `first` to after step `last`; the trials have more steps."""
    window = Window(bench, first, last)
    pack = pack_of(trials, bench.device)
    train_pack(pack, dict.fromkeys(range(len(trials))), progress=window, **options)
    if not window.seconds:
        raise RuntimeError(f"the pack came to its end before step {last}")
    return window.seconds / (last - first)
