"""Synthetic sweeps, written through the real store: losses come from a formula, so that tests know them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.reading.acted import Acting
from harness.config import PER_TRIAL, Fault, Model, Optim, Train, Trial, number
from harness.objectives.table import OBJECTIVES
from harness.storage.store import SIGNALS, PackStore, Signal, open_store

CORPUS = {"source": "stdlib", "fingerprint": "c0ffee", "tokens": 1000}
ENVIRONMENT = {"torch": "2.0", "device": "cpu", "threads": 1}
INITIAL = 5.0
READ = ("loss", "grad_norm", "validation_loss", "step_seconds")  # the signals that figures and tables are made of


@dataclass(frozen=True)
class WeightBit(Fault):
    kind: str = "value"
    name: str = "weight_bit"
    tensor: str = "blocks.0.*"
    bit: int = number(PER_TRIAL, 30, "bit to flip", low=0)


@dataclass(frozen=True)
class RareTokens(Fault):
    kind: str = "rare_tokens"
    name: str = "rare_tokens"


@dataclass(frozen=True)
class LastBit(Fault):
    kind: str = "value"
    name: str = "last_bit"
    bit: int = number(PER_TRIAL, 0, "bit to flip", low=0)


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
    grad_norm: Callable[[Trial], np.ndarray] | None = None,
    outcome: Callable[[Trial], str] = lambda trial: "trained",
    masked_step: Callable[[Trial], int | None] = lambda trial: None,
    signals: Mapping[str, Callable[[Trial], np.ndarray]] | None = None,
    measured: Iterable[str] = tuple(SIGNALS),
    ends: Mapping[str, Callable[[Trial], np.ndarray]] | None = None,
    acting: Callable[[Trial], Acting] = lambda trial: Acting({}, {}, ""),
    guarded: Mapping[str, Signal] | None = None,
) -> PackStore:
    """A pack whose `loss` is given, and `signals` beside it; others are 1. Non-finite from the first NaN loss on.

    Validation losses are the training ones where they are not given; `ends` are [segment], and NaN where not given.
    `guarded` are the signals that guards declare, whose values are in `signals`.

    Its faults struck as often as they have events, which the store keeps as the loop does: 64 of a trial.
    """
    folder = open_store(out, study)
    steps, layers = trials[0].train.steps, trials[0].model.depth
    pack = pack or hashlib.sha256(" ".join(t.id for t in trials).encode()).hexdigest()[:16]
    loss_signal = Signal(SIGNALS["loss"].dims, *OBJECTIVES[trials[0].objective.name].reported)
    guarded = {"loss": loss_signal, **(guarded or {})}
    store = PackStore.create(folder, pack, trials, steps, layers, CORPUS, ENVIRONMENT, block, guarded)
    values = {name: np.ones(store.shape(name), "f4") for name in measured}
    values["loss"] = np.array([loss(trial) for trial in trials], "f4")
    if "validation_loss" in values:
        values["validation_loss"] = values["loss"].copy()
    if grad_norm is not None:
        values["grad_norm"] = np.array([grad_norm(trial) for trial in trials], "f4")
    for name, curve in (signals or {}).items():
        values[name] = np.array([curve(trial) for trial in trials], "f4")
    done = steps if steps_done is None else steps_done
    if done:
        store.write(0, {name: array[:, :done] for name, array in values.items()})
    if finish:
        store.write_ends({name: np.array([own(trial) for trial in trials]) for name, own in (ends or {}).items()})
        lost = ~np.isfinite(values["loss"])
        first = [int(np.argmax(row)) if row.any() else None for row in lost]
        endings = [outcome(t) if step is None else "non-finite" for t, step in zip(trials, first, strict=True)]
        events = [faults(trial) for trial in trials]
        store.finish(
            outcome=endings,
            nonfinite_step=first,
            masked_step=[masked_step(trial) for trial in trials],
            faults=[own[:64] for own in events],
            strikes=[len(own) for own in events],
            changes=[sum(event["changed"] for event in own) for own in events],
            **{name: [getattr(acting(trial), name) for trial in trials] for name in ("acts", "idle", "digest")},
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
    if trial.fault.name != "none":
        after = np.clip(steps - trial.fault.start, 0, None)
        height = {"weight_bit": 2.0, "rare_tokens": 1.1}[trial.fault.name] * (0.4 if trial.mitigation != "none" else 1)
        loss += np.where(after > 0, height * (1 + 0.3 * trial.seed) * np.exp(-after / 30), 0)
    return loss


def strike_events(trial: Trial) -> list[dict[str, Any]]:
    if trial.fault.name == "none":
        return []
    event = {"site": "weight", "tensor": "blocks.0.attention.query", "index": 17, "bit": 30, "changed": True}
    duration = trial.train.steps if trial.fault.duration is None else trial.fault.duration
    steps = range(trial.fault.start, min(trial.fault.start + duration, trial.train.steps), trial.fault.period)
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
            own = trials[part : part + 10]
            write_pack(out, own, training_curve, faults=strike_events, study="synthetic", block=steps, measured=READ)


# --- a realistic campaign ----------------------------------------------------------------------------------------

SITES = {"weight": "weight_bit", "reduced_gradient": "gradient_bit", "moment_2": "moment_bit"}
TENSORS = ("attention.query", "attention.projection", "feedforward.up", "feedforward.down")


@dataclass(frozen=True)
class BitFault(Fault):
    kind: str = "value"
    name: str = "weight_bit"
    site: str = "weight"
    tensor: str = "blocks.0.attention.query"
    bit: int = number(PER_TRIAL, 30, "bit to flip", low=0)


def bit_events(trial: Trial) -> list[dict[str, Any]]:
    fault = trial.fault
    if not isinstance(fault, BitFault):
        return [] if fault.name == "none" else [{"site": "weight", "tensor": "head", "bit": 0, "changed": True}]
    if fault.seed is not None and fault.seed % 20 == 19:
        return []
    address = {"site": fault.site, "tensor": fault.tensor, "bit": fault.bit, "step": fault.start}
    return [address | {"index": [3], "before": 0.1, "after": 9.0, "changed": True, "rank": 0, "mask": None}]


def bit_curve(trial: Trial) -> np.ndarray:
    """Golden plus a deviation that grows with the bit, and that beta2 forgets; the highest bits blow up."""
    steps, fault = np.arange(trial.train.steps), trial.fault
    rng = np.random.default_rng([trial.seed, trial.model.width])
    loss = 2.6 + 3 * np.exp(-steps / 15) + rng.normal(0, 0.05, len(steps))
    if fault.name == "none":
        return loss
    own = np.random.default_rng([trial.seed, fault.seed or 0])
    after = np.clip(steps - fault.start, 0, None)
    noise = np.where(steps > fault.start, own.normal(0, 1e-4, len(steps)) * np.minimum(1, after / 10), 0)
    if not isinstance(fault, BitFault) or not bit_events(trial):
        return loss + (noise if isinstance(fault, LastBit) else 0)
    strength = 10 ** (0.3 * (min(fault.bit, 30) - 28)) * own.lognormal(0, 1) * (0.2 if trial.optim.clip else 1)
    memory = 1.5 / (1 - trial.optim.beta2) if fault.site == "moment_2" else 10.0
    with np.errstate(over="ignore"):
        size = strength * np.exp(-after / memory) + (0.2 * strength if own.random() < 0.15 else 0)
    values = loss + noise + np.where(steps > fault.start, np.minimum(size, 40), 0)
    if strength > 8:
        values[fault.start + 12 :] = np.nan
    return values


def write_campaign(
    out: Path,
    faults: int = 200,
    sites: Sequence[str] = tuple(SITES),
    layers: int = 2,
    bits: Sequence[int] = tuple(range(32)),
    beta2s: Sequence[float] = (0.95, 0.99, 0.999),
    clips: Sequence[float | None] = (None, 1.0),
    twins: int = 8,
    steps: int = 100,
    starts: Sequence[int] | None = None,
) -> None:
    """A campaign of `faults` bit faults for each beta2 and clip, with the twins of its clean envelopes."""
    rng = np.random.default_rng(0)
    for beta2, clip in product(beta2s, clips):
        optim = {"beta2": beta2, "clip": clip}
        struck = [
            BitFault(
                name=SITES.get(site, f"{site}_bit"),
                site=site,
                tensor=f"blocks.{rng.integers(layers)}.{rng.choice(TENSORS)}",
                bit=int(rng.choice(bits)),
                start=int(rng.integers(1, steps - 10) if starts is None else rng.choice(starts)),
                seed=n,
            )
            for n, site in enumerate(rng.choice(list(sites), faults))
        ]
        clean = [LastBit(start=1, seed=n) for n in range(twins)]
        trials = [
            make_trial(seed=n % 2, fault=fault, steps=steps, **optim) for n, fault in enumerate([*clean, *struck])
        ]
        write_pack(out, with_golden(trials), bit_curve, faults=bit_events, study="campaign", block=steps, measured=READ)


FIVE_SITES = ("weight", "reduced_gradient", "clipped_gradient", "moment_1", "moment_2")
SIZES = {
    "three sites": {},
    "one site, one bit, no envelope": {
        "faults": 6,
        "sites": ["weight"],
        "layers": 1,
        "bits": [30],
        "beta2s": [0.95],
        "clips": [None],
        "twins": 0,
    },
    "five sites, twelve layers": {"faults": 150, "sites": FIVE_SITES, "layers": 12, "beta2s": [0.9, 0.99, 0.999]},
    "few faults": {"faults": 20, "bits": [18, 27]},
    "faults that begin together": {"faults": 40, "starts": [50]},
}
"""What `write_campaign` is called with, by name."""


class Made(dict):
    """Values by name, each made when it is first asked for."""

    def __init__(self, make: Callable[[str], Any]):
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Any:
        return self.setdefault(name, self.make(name))


# --- reading figures ---------------------------------------------------------------------------------------------


def settings() -> dict[str, object]:
    return {name: value for name, value in matplotlib.rcParams.items() if name != "backend"}


SETTINGS = settings()  # as they were before anything was drawn


def check_texts(figure: Figure) -> int:
    """Fails if a text of the figure lies on another or beyond the page; gives the number of texts."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = drawn_texts(figure)
    words = [text.get_text() for text in texts]
    boxes = np.array([text.get_window_extent(renderer).extents for text in texts])
    low, high = boxes[:, :2], boxes[:, 2:]
    is_inside = (figure.bbox.min <= low).all(axis=1) & (high <= figure.bbox.max).all(axis=1)
    assert is_inside.all(), [words[i] for i in np.flatnonzero(~is_inside)]
    overlaps = (low[:, None] <= high).all(axis=2) & (low <= high[:, None]).all(axis=2)
    assert not np.triu(overlaps, 1).any(), [(words[i], words[j]) for i, j in np.argwhere(np.triu(overlaps, 1))]
    return len(words)


def drawn_texts(figure: Figure) -> list[Text]:
    texts = [*figure.texts, *(text for legend in figure.legends for text in [legend.get_title(), *legend.get_texts()])]
    for panel in figure.axes:
        texts += [panel.title, panel._left_title, panel.xaxis.label, panel.yaxis.label, *panel.texts]
        for axis in (panel.xaxis, panel.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [
                label
                for tick in axis.get_major_ticks()
                for label in (tick.label1, tick.label2)
                if low <= tick.get_loc() <= high
            ]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def legend_words(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]
