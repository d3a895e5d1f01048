"""Trains small packs through the real loop and keeps every bit that they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import CORE, ConfigError, Data, Trial, field_types, sections, shown
from harness.data.corpus import Corpus, load_corpus
from harness.faults.fault import injector_of as arm
from harness.loop.loop import Result, train
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule, Injector

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "width": 16,
    "head_dim": 8,
    "depth": 2,
    "context": 8,
    "steps": 8,
    "batch": 2,
    "validate_every": 4,
    "validate_tokens": 64,
    "validate_between": 64,
    "source": "zipf",
    "vocabulary": 64,
    "length": 20_000,
    "warmup": 2,
    "final": 0.0,
    "beta2": 0.999,
    "clip": None,
    "decay_follows": "rate",
}
"""One-hundredth of a second a step, and still a whole GPT: two blocks, two heads."""


def trial(**fields: Any) -> Trial:
    """A small trial, with fields by their short names: `lr=1e-2`, `width=32`; `init` and `order` are the two seeds.

    What an optimizer or a clipper brings along is a mapping, or an object, by its name: `spam={"interval": 4}`.
    """
    parts: dict[str, dict[str, Any]] = {name: {} for name in CORE}
    identity, brought = {}, {}
    for name, value in {**SMALL, **fields}.items():
        if name in ("fault", "seed"):
            identity[name] = value
        elif name in ("init", "order") and isinstance(value, int):
            parts["model" if name == "init" else "data"]["seed"] = value
        elif isinstance(value, Mapping):
            brought[name] = sections()[name](**value)
        elif is_dataclass(value):
            brought[name] = value
        else:
            part = next((part for part, cls in CORE.items() if name in field_types(cls)), None)
            if part is None:
                known = ", ".join(sorted(name for cls in CORE.values() for name in field_types(cls)))
                sectioned = ", ".join(sorted(set(sections()) - set(CORE)))
                raise ConfigError(
                    f"{name}={shown(value)}: no field of a trial; allowed: {known}, or a mapping for {sectioned}"
                )
            parts[part][name] = value
    return Trial.of({name: cls(**parts[name]) for name, cls in CORE.items()} | brought, **identity)


def different(count: int, **fields: Any) -> list[Trial]:
    """Trials of one structure that differ in every per-trial field; a tuple holds a value for each of them, in turn."""
    return [
        trial(
            **{
                "seed": r,
                "lr": 3e-3 * (1 + r),
                "beta1": 0.9 - 0.02 * r,
                "beta2": 0.999 - 0.01 * r,
                "eps": 1e-8 * 10**r,
                "weight_decay": 1e-3 * r,
                "clip": None if r % 3 == 2 else 0.5 + 0.1 * r,
                "warmup": r % 3,
                "decay": ("cosine", "linear", "constant")[r % 3],
            }
            | in_turn(fields, r)
        )
        for r in range(count)
    ]


def in_turn(fields: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The fields of trial `number`, where a tuple holds a value for each, in turn."""
    return {name: value[number % len(value)] if isinstance(value, tuple) else value for name, value in fields.items()}


def corpus_of(a_trial: Trial) -> Corpus:
    """The text of a small trial, read once."""
    return _corpus(replace(a_trial.data, seed=None))


@lru_cache
def _corpus(data: Data) -> Corpus:
    return load_corpus(data, context=256)


def injector_of(a_trial: Trial) -> Injector | None:
    """The trial's fault, armed, as a sweep arms it."""
    return arm(a_trial, corpus_of(a_trial))


def pack_of(trials: Sequence[Trial], begins: Sequence[int | None] | None = None, device: torch.device = CPU) -> Pack:
    """The pack of these trials; `begins` are the steps at which those with a fault get a row of their own."""
    return Pack(trials, corpus_of(trials[0]), device, begins)


@dataclass(frozen=True)
class Run:
    """Everything that a pack left, by planned trial.

    `signals` are [R, steps] or [R, steps, layers]; `weights[block][trial]` is a copy of the flat weights after that
    block of steps, for the trials that were still in the pack.
    """

    pack: Pack
    result: Result
    signals: dict[str, np.ndarray]
    weights: list[dict[int, Tensor]]
    corpus: Corpus

    def __getitem__(self, planned: int) -> dict[str, Tensor]:
        """Whatever the trial left, apart from how long it took: for comparison with `same_bits`."""
        signals = {name: torch.from_numpy(values[planned]) for name, values in self.signals.items()}
        del signals["tokens_per_second"], signals["step_seconds"]
        signals |= {name: torch.from_numpy(values[planned]) for name, values in self.result.ends.items()}
        return {**signals, "weights": self.weights[-1].get(planned, torch.empty(0))}


def run(
    trials: Sequence[Trial],
    injectors: Mapping[int, Injector | None] | None = None,
    prepare: Callable[[Pack], Any] = lambda pack: None,
    block: int = 1,
    forks: bool = False,
    **options: Any,
) -> Run:
    """Train a pack. `injectors` take the place of the trials' faults; `prepare(pack)` may change it beforehand.

    With `forks` faulty trials share the row of their twin until their fault begins.
    """
    fault_schedule = FaultSchedule([(injectors or {}).get(i, injector_of(t)) for i, t in enumerate(trials)])
    pack = pack_of(trials, fault_schedule.first if forks else None)
    prepare(pack)
    blocks: dict[int, Mapping[str, np.ndarray]] = {}  # one that is written again takes the place of the first
    weights: dict[int, dict[int, Tensor]] = {}

    def write(first_step: int, arrays: Mapping[str, np.ndarray]) -> None:
        blocks[first_step] = arrays
        now = {planned: pack.weights[row].clone() for row, planned in enumerate(pack.rows)}
        weights[first_step] = weights.get(first_step, {}) | now

    result = train(pack, fault_schedule, block, write, **options)
    signals = {name: np.concatenate([blocks[first][name] for first in sorted(blocks)], axis=1) for name in blocks[0]}
    return Run(pack, result, signals, [weights[first] for first in sorted(weights)], corpus_of(trials[0]))


def left(run: Run, number: int) -> dict[str, Tensor]:
    """What a trial left; any NaN is the same, because its sign depends on where in the pack a row stands."""
    return {name: x.where(~x.isnan(), torch.nan) for name, x in run[number].items()}


def assert_same_trials(
    one: Run, other: Run, places: Mapping[int, int] | None = None, names: Sequence[str] | None = None
) -> None:
    """Each trial at its place in the other run (None: all, at the same), bit for bit; `names`: in these signals alone.

    Weights count where the trial had a row to the end in both.
    """
    for number, place in (places or {number: number for number in range(len(one.pack.planned))}).items():
        ours, theirs = left(one, number), left(other, place)
        compared = set(names or ours) - (set() if len(ours["weights"]) and len(theirs["weights"]) else {"weights"})
        ours, theirs = ({name: x for name, x in each.items() if name in compared} for each in (ours, theirs))
        assert same_bits(ours, theirs) == [], f"trial {number}"
        assert one.result.dropped[number] == other.result.dropped[place]


def assert_fork_equals_full_run(trials: Sequence[Trial], full: Run | None = None, **options: Any) -> Run:
    """Rows that come with their faults change nothing; `full` is the run without forks, if it is there already."""
    forked, full = run(trials, forks=True, **options), full or run(trials, **options)
    assert_same_trials(forked, full)
    assert forked.result == full.result
    return forked


class Killed(Exception):
    """What a test takes for the end of a process."""


def assert_resumes(
    trials: Sequence[Trial], folder: Path, kills: Sequence[int], block: int = 1, forks: bool = False
) -> None:
    """Killed before each of these steps and started again from `folder`, a pack leaves what it leaves otherwise."""
    whole = run(trials, block=block, forks=forks)
    assert_same_end(resumed(trials, folder, kills, block, forks), whole)


def assert_same_end(found: Run, whole: Run, begin: int = 0) -> None:
    """The same results, signals and state, bit for bit; `found` has the signals of the steps from `begin` on."""
    assert found.result == whole.result
    for name, expected in whole.result.ends.items():
        assert np.array_equal(found.result.ends[name], expected, equal_nan=True), name
    for name, expected in whole.signals.items():
        if name not in ("tokens_per_second", "step_seconds"):
            assert np.array_equal(found.signals[name], expected[:, begin:], equal_nan=True), name
    assert found.pack.rows == whole.pack.rows
    assert same_bits(dict(found.pack.rows_state), dict(whole.pack.rows_state)) == []


def resumed(
    trials: Sequence[Trial],
    folder: Path,
    kills: Sequence[int],
    block: int = 1,
    forks: bool = False,
    arm: Callable[[Trial], Injector | None] = injector_of,
) -> Run:
    """What a pack leaves that is killed before each of these steps and started again from `folder`.

    Signals count as the store keeps them: a block that is written again takes the place of the first.
    """
    blocks: dict[int, Mapping[str, np.ndarray]] = {}
    place = ResultsPath.at(folder)

    def once(checkpoints: Checkpoints | None) -> tuple[Pack, Result]:
        fault_schedule = FaultSchedule([arm(trial) for trial in trials])
        pack = pack_of(trials, fault_schedule.first if forks else None)
        saved = Checkpoints(place).newest()
        return pack, train(pack, fault_schedule, block, blocks.__setitem__, checkpoints=checkpoints, saved=saved)

    for kill in kills:
        try:
            once(Dying(place, every=1, dies_at=kill))
        except Killed:
            continue
        raise AssertionError(f"it ended before step {kill}")
    pack, result = once(None)
    names = blocks[max(blocks)]
    signals = {name: np.concatenate([blocks[first][name] for first in sorted(blocks)], axis=1) for name in names}
    weights = {planned: pack.weights[row].clone() for row, planned in enumerate(pack.rows)}
    return Run(pack, result, signals, [weights], corpus_of(trials[0]))


@dataclass
class Dying(Checkpoints):
    """Checkpoints of a process that ends once it has saved the one before step `dies_at`."""

    dies_at: int = -1

    def save(self, step: int, *state: Any) -> None:
        super().save(step, *state)
        if step == self.dies_at:
            raise Killed


def bits(x: Tensor) -> Tensor:
    """The bits as integers: NaN equals itself, and zero differs from minus zero."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """The names under which the two differ in any bit; empty if all are equal."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(bits(left[name]), bits(right[name]))]
