"""Sweeps of mitigations whose results are given, trial by trial, so that tests know what a comparison comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from analysis import open_sweep
from analysis.measures.mitigations import Comparison, compare
from harness.config import Fault, Trial
from tests.analysis import synthetic

STEPS, START = 40, 20
RATES = (1e-3, 1e-2, 1e-1)
GOLDEN = 2.0


@dataclass(frozen=True)
class Ending:
    """How a trial ends: its final loss, the harness's word, and how it deviates from its twin, by steps since START."""

    loss: float = GOLDEN
    outcome: str = "trained"
    is_lost: bool = False
    deviation: dict[int | range, float] = field(default_factory=dict)
    changed: bool = True
    seconds: float = 1.0


LOST = Ending(outcome="non-finite", is_lost=True)


class Study:
    """Writes a sweep into a folder, and compares its mitigations."""

    def __init__(self, out: Path):
        self.out = out
        self.compared: Comparison | None = None

    def flip(self, **fields) -> Fault:
        return synthetic.WeightBit(start=START, **fields)

    def poison(self, duration: int | None = 3) -> Fault:
        return synthetic.RareTokens(start=START, duration=duration)

    def write(
        self,
        ending: Callable[[Trial], Ending] = lambda trial: Ending(),
        mitigations: Sequence[str] = ("none", "qk_norm"),
        faults: Sequence[Fault] = (),
        widths: Sequence[int] = (32,),
        rates: Sequence[float] = RATES,
        seeds: Sequence[int] = (0, 1, 2),
        depths: Sequence[int] = (2,),
        **options,
    ) -> Study:
        """A pack for each mitigation, width and depth."""
        for mitigation, width, depth in product(mitigations, widths, depths):
            trials = [
                synthetic.make_trial(width, lr, seed, mitigation, fault, depth=depth, steps=STEPS)
                for lr, seed, fault in product(rates, seeds, [None, *faults])
            ]
            self.write_pack(trials, ending, **options)
        return self

    def write_pack(
        self, trials: Sequence[Trial], ending: Callable[[Trial], Ending] = lambda trial: Ending(), **options
    ) -> None:
        def loss(trial: Trial) -> np.ndarray:
            own = ending(trial)
            curve = np.full(STEPS, ending(trial.golden).loss)
            curve[0] = synthetic.INITIAL
            for where, value in own.deviation.items():
                curve[START:][[*where] if isinstance(where, range) else where] += value
            if own.is_lost:
                curve[-5:] = np.nan
            return curve

        def events(trial: Trial) -> list[dict]:
            site = "batch" if isinstance(trial.fault, synthetic.RareTokens) else "weight"
            event = {"site": site, "tensor": "head", "bit": 0, "step": START, "changed": ending(trial).changed}
            return [] if trial.fault.name == "none" else [event]

        signals = {
            "validation_loss": lambda trial: np.full(STEPS, np.nan if ending(trial).is_lost else ending(trial).loss),
            "step_seconds": lambda trial: np.full(STEPS, ending(trial).seconds),
        }
        self.compared = None
        own = {"faults": events, "outcome": lambda trial: ending(trial).outcome, "signals": signals}
        own |= {"block": STEPS, "measured": synthetic.READ}
        synthetic.write_pack(self.out, trials, loss, **own | options)

    @property
    def sweep(self) -> xr.Dataset:
        return open_sweep(self.out)

    def compare(self) -> Comparison:
        """What there is to compare, of all that was written so far."""
        self.compared = self.compared or compare(self.sweep)
        return self.compared

    def row(self, mitigation: str = "qk_norm", **where: object) -> pd.Series:
        """The one row of a mitigation, at the width or whatever else `where` names."""
        table = self.compare().table
        table = table[table["mitigation"] == mitigation]
        for name, value in where.items():
            table = table[table[name] == value]
        assert len(table) == 1
        return table.iloc[0]


def of_seeds(**by_mitigation: Sequence[float]) -> Callable[[Trial], Ending]:
    """Final losses at every rate, by mitigation a number for each seed."""
    return lambda trial: Ending(loss=by_mitigation[trial.mitigation][trial.seed])


def of_faults(size: Callable[[Trial], dict[int | range, float]], **fields) -> Callable[[Trial], Ending]:
    """Golden trials that end alike, and what `size` says of faulty ones: deviations by steps since START."""
    return lambda trial: Ending(deviation={} if trial.fault.name == "none" else size(trial), **fields)


def numbers(row: pd.Series, metric: str) -> tuple[float, ...]:
    """(value, low, high, change, its low, its high)."""
    return tuple(row[f"{metric}{end}"] for end in ("", "_low", "_high", "_change", "_change_low", "_change_high"))
