"""Campaigns whose deviations are given, step by step, so that tests know what they come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr

from analysis import open_sweep, outcomes
from analysis.measures.envelope import FEWEST_TWINS
from harness.config import Trial
from tests.analysis import synthetic

STEPS, START = 40, 20
GOLDEN = 2.0
ENVELOPE_MAX, ENVELOPE_FINAL = 0.5, 0.25  # of the twins below; these and their sums with GOLDEN are exact in float32
SLIGHTLY = 2.0**-20

Curve = dict[int | range, float] | np.ndarray


def deviation(curve: Curve, steps: int = STEPS) -> np.ndarray:
    """D_t [steps] from the steps at which it is not 0."""
    if isinstance(curve, np.ndarray):
        return curve
    values = np.zeros(steps)
    for where, value in curve.items():
        values[where] = value
    return values


class Campaign:
    """Trials whose loss is GOLDEN + D_t; written by name, judged, and read by name."""

    def __init__(self, out: Path):
        self.out = out
        self.trials: dict[str, Trial] = {}
        self.curves: dict[str, np.ndarray] = {}
        self.options: dict[str, Callable] = {}

    def fault(self, name: str, curve: Curve, start: int = START, base: Trial | None = None, **fields) -> Trial:
        fault = synthetic.WeightBit(start=start, tensor=f"t{len(self.trials)}", **fields)
        return self.add(name, dataclasses.replace(base or synthetic.make_trial(steps=STEPS), fault=fault), curve)

    def add(self, name: str, trial: Trial, curve: Curve) -> Trial:
        self.trials[name] = trial
        self.curves[trial.id] = GOLDEN + deviation(curve, trial.train.steps)
        return trial

    def envelope(self, count: int = FEWEST_TWINS, base: Trial | None = None, scale: float = 1.0) -> None:
        """Twins of which the first reaches ENVELOPE_MAX and the second, from below, ENVELOPE_FINAL."""
        base = base or synthetic.make_trial(steps=STEPS)
        curves: list[Curve] = [{25: ENVELOPE_MAX * scale}, {range(30, STEPS): -ENVELOPE_FINAL * scale}]
        for number in range(count):
            trial = dataclasses.replace(base, fault=synthetic.LastBit(start=START, seed=number))
            self.add(f"twin {len(self.trials)}", trial, curves[number] if number < 2 else {28: -SLIGHTLY})

    def write(self, trials: list[Trial] | None = None, **options) -> None:
        trials = synthetic.with_golden(self.trials.values()) if trials is None else trials
        curve = self.curves.get
        synthetic.write_pack(
            self.out, trials, lambda t: curve(t.id, np.full(t.train.steps, GOLDEN)), faults=events, **options
        )

    def judge(self) -> Judged:
        return Judged(self, outcomes(open_sweep(self.out)))

    def by_name(self, values: dict[str, object], otherwise: object = None) -> Callable[[Trial], object]:
        found = {self.trials[name].id: value for name, value in values.items()}
        return lambda trial: found.get(trial.id, otherwise)


class Judged:
    def __init__(self, campaign: Campaign, sweep: xr.Dataset):
        self.campaign, self.sweep = campaign, sweep

    def __call__(self, coordinate: str, name: str):
        return self.sweep[coordinate].sel(trial=self.campaign.trials[name].id).item()


def events(trial: Trial) -> list[dict]:
    if trial.fault.name == "none" or (trial.fault.name, trial.fault.bit) == ("weight_bit", NEVER_FIRES):
        return []
    event = {"site": "weight", "tensor": "head", "bit": 30, "before": 0.1, "after": 0.2, "step": trial.fault.start}
    return [event | {"changed": trial.fault.bit != 1}]


NEVER_FIRES, CHANGES_NOTHING = 0, 1  # values of `bit`, for `events`
