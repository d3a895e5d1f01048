"""Synthetic sweeps, written through the real store: losses come from a formula, so that tests know them.

Tests reach what is defined here through the fixture `synthetic`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from harness.config import PER_TRIAL, Fault, Model, Optim, Train, Trial, number
from harness.store import SIGNALS, PackStore, open_store

CORPUS = {"source": "stdlib", "fingerprint": "c0ffee", "tokens": 1000}
ENVIRONMENT = {"torch": "2.0", "device": "cpu", "threads": 1}
INITIAL = 5.0


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep of all that the figures show."""
    out = tmp_path_factory.mktemp("realistic")
    write_realistic_sweep(out)
    return out


@dataclass(frozen=True)
class WeightBit(Fault):
    kind: str = "weight_bit"
    tensor: str = "blocks.0.*"
    bit: int = number(PER_TRIAL, 30, "bit to flip", low=0)


@dataclass(frozen=True)
class RareTokens(Fault):
    kind: str = "rare_tokens"


def make_trial(
    width: int = 32,
    lr: float = 1e-2,
    seed: int = 0,
    mitigation: str = "none",
    fault: Fault | None = None,
    depth: int = 2,
    steps: int = 40,
    **optim: float,
) -> Trial:
    model = Model(width=width, depth=depth, qk_norm=mitigation == "qk_norm")
    return Trial(
        model=model,
        optim=Optim(lr=lr, **optim),
        train=Train(steps=steps),
        fault=fault or Fault(),
        mitigation=mitigation,
        seed=seed,
    )


def flat_loss(trial: Trial) -> np.ndarray:
    """5 at the first step, then a constant that grows with the distance from the best rate, 1e-2."""
    loss = np.full(trial.train.steps, 2 + abs(np.log10(trial.optim.lr) + 2))
    loss[0] = INITIAL
    return loss


def write_pack(
    out: Path,
    trials: Sequence[Trial],
    loss: Callable[[Trial], np.ndarray] = flat_loss,
    pack: str | None = None,
    steps_done: int | None = None,
    finish: bool = True,
    block: int = 10,
    faults: Callable[[Trial], list[dict[str, Any]]] = lambda trial: [],
    study: str = "test",
) -> PackStore:
    """A pack whose `loss` is given and whose other signals are 1; non-finite from the first NaN on."""
    open_store(out, study)
    steps, layers = trials[0].train.steps, trials[0].model.depth
    pack = pack or hashlib.sha256(" ".join(t.id for t in trials).encode()).hexdigest()[:16]
    store = PackStore.create(out, pack, trials, steps, layers, CORPUS, ENVIRONMENT, block)
    values = {name: np.ones(store.shape(name), "f4") for name in SIGNALS}
    values["loss"] = np.array([loss(trial) for trial in trials], "f4")
    done = steps if steps_done is None else steps_done
    if done:
        store.write(0, {name: array[:, :done] for name, array in values.items()})
    if finish:
        lost = ~np.isfinite(values["loss"])
        first = [int(np.argmax(row)) if row.any() else None for row in lost]
        store.finish(
            ["trained" if step is None else "non-finite" for step in first], first, [faults(t) for t in trials]
        )
    return store


def with_golden(trials: Iterable[Trial]) -> list[Trial]:
    return list(dict.fromkeys(twin for trial in trials for twin in (trial.golden, trial)))


# --- a realistic sweep -------------------------------------------------------------------------------------------

RATES = (1e-3, 3e-3, 1e-2, 1e-1, 3e-1)


def training_curve(trial: Trial) -> np.ndarray:
    """A loss curve that looks like one: noise by seed, instability at high rates unless mitigated, faults that show."""
    steps = np.arange(trial.train.steps)
    rng = np.random.default_rng([trial.seed, trial.model.width])
    strength = np.log10(trial.optim.lr / 1e-2)
    final = 2.6 - 0.15 * np.log2(trial.model.width / 32) + 0.25 * strength**2
    if strength > 0.5 and trial.mitigation == "none":
        final += 1.1 * strength * (1 + 0.3 * np.log2(trial.model.width / 32))
    loss = final + (5.55 - final) * np.exp(-steps / 25) + rng.normal(0, 0.05, len(steps))
    if trial.mitigation == "none" and strength > 1.4 and trial.seed == 0:
        loss[60:] = np.nan
    if trial.fault.kind != "none":
        after = np.clip(steps - trial.fault.start, 0, None)
        height = {"weight_bit": 2.0, "rare_tokens": 1.1}[trial.fault.kind] * (0.4 if trial.mitigation != "none" else 1)
        loss += np.where(after > 0, height * (1 + 0.3 * trial.seed) * np.exp(-after / 30), 0)
    return loss


def strike_events(trial: Trial) -> list[dict[str, Any]]:
    if trial.fault.kind == "none":
        return []
    event = {"site": "weight", "tensor": "blocks.0.attention.query", "index": 17, "bit": 30, "changed": True}
    steps = range(trial.fault.start, trial.fault.start + trial.fault.duration)
    return [event | {"step": step, "before": 0.1, "after": np.inf} for step in steps]


def write_realistic_sweep(out: Path, widths: Sequence[int] = (32, 64, 128), seeds: int = 2, steps: int = 120) -> None:
    """Five rates, two mitigations, two faults."""
    faults = [Fault(), WeightBit(start=steps // 2), RareTokens(start=steps // 2, duration=8)]
    for width, mitigation in product(widths, ("none", "qk_norm")):
        trials = [
            make_trial(width, lr, seed, mitigation, fault, steps=steps)
            for lr, seed, fault in product(RATES, range(seeds), faults)
        ]
        for part in range(0, len(trials), 10):
            write_pack(out, trials[part : part + 10], training_curve, faults=strike_events, study="synthetic")
