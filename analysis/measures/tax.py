"""The price of stability: what a measure costs in steps to equal loss, and in runs that fail with and without it.

What a step of it takes is measured by turns (`analysis/again/step_costs.py`); here both come together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import RateGrid, seed_numbers, segment_losses, swept_axes, trial_table
from analysis.measures.paired import Estimate
from analysis.measures.statistics import mean_interval, median_interval, wilson_interval
from analysis.reading.groups import is_seed
from analysis.reading.levels import in_order, is_level, word
from harness.basics.errors import nearest
from harness.basics.printing import label
from harness.config import NO_FAULT, ConfigError
from harness.config.names import LAST_BIT
from harness.objectives.outcome import TRAINED

FEWEST = 4  # validations of a run, from which its curve is read
NOTHING = 1.0, 1.0, 1.0


@dataclass(frozen=True)
class LossCurve:
    """Validation losses of a run, nat/token, after so many `steps`; the first before any step."""

    steps: np.ndarray
    losses: np.ndarray

    def reached(self, loss: float) -> float:
        """After how many steps it was first as low, between validations by a straight line; infinite: never."""
        lowest = np.fmin.accumulate(self.losses)
        below = np.flatnonzero(lowest <= loss)
        if not len(below):
            return np.inf
        at = int(below[0])
        if not at:
            return float(self.steps[0])
        high, low = lowest[at - 1], lowest[at]
        share = (high - loss) / (high - low) if np.isfinite(high) else 1.0
        return float(self.steps[at - 1] + share * (self.steps[at] - self.steps[at - 1]))


def steps_factor(own: LossCurve, other: LossCurve) -> float:
    """How many times the steps of the other run this one needs for the same loss: the higher of both final ones.

    Below 1 where it is there first. Infinite where it ended non-finite, or has learned nothing; NaN where the other
    one has.
    """
    ends = own.losses[-1], other.losses[-1]
    if not ends[1] < other.losses[0]:
        return np.nan
    if not ends[0] < own.losses[0]:
        return np.inf
    if ends[0] <= ends[1]:
        return own.reached(ends[1]) / float(own.steps[-1])
    reached = other.reached(ends[0])
    return float(other.steps[-1]) / reached if reached else np.inf


@dataclass(frozen=True)
class TaxedArm:
    """One level of an axis against another, at one width and whatever else the sweep varies; each at its best rate.

    `steps`: the factor of steps to equal loss over seeds, geometric mean with its t interval. `failed` and
    `failed_without`: shares of runs that were not trained, those with faults too, with Wilson intervals; `seeds` of
    each is how many runs. `trial` and `without`: ids of a run of each, to time.
    """

    place: dict[str, Any]
    level: str
    rate: float
    rate_without: float
    steps: Estimate
    failed: Estimate
    failed_without: Estimate
    trial: str
    without: str

    def total(self, ratios: np.ndarray) -> Estimate:
        """(1 + tax on time) (1 + tax on steps), from ratios of step times by round; of none the steps alone."""
        middle, low, high = median_interval(ratios) if len(ratios) else NOTHING
        steps = self.steps
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.log(middle * steps.value)
            reach = [
                np.hypot(np.log(middle / low), np.log(steps.value / steps.low)),
                np.hypot(np.log(high / middle), np.log(steps.high / steps.value)),
            ]
        return _estimate(np.exp([value, value - reach[0], value + reach[1]]), steps.seeds)

    def expected(self, total: Estimate) -> Estimate:
        """Cost to completion over that without the measure, where a run that fails is begun again.

            total x (1 - P(fails without)) / (1 - P(fails))

        Its ends take the worse end of each part, so that the interval is wider than 95%.
        """
        own, other = self.failed, self.failed_without
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = [
                np.float64(cost * (1 - without)) / (1 - share)
                for cost, without, share in (
                    (total.value, other.value, own.value),
                    (total.low, other.high, own.low),
                    (total.high, other.low, own.high),
                )
            ]
        return _estimate(ends, own.seeds)


def _estimate(numbers: Iterable[float], seeds: int) -> Estimate:
    value, low, high = map(float, numbers)
    return Estimate(value, low, high, seeds=seeds)


def break_even(total: float) -> float:
    """The share of runs that a measure has to save from being lost as a whole, for its cost: 1 - 1 / total."""
    return max(0.0, 1 - 1 / total)


def taxed_arms(sweep: xr.Dataset, axis: str = "mitigation", against: str = "none") -> list[TaxedArm]:
    """Every level of `axis` against one of them, at each width and whatever else the sweep varies beside rates.

    `axis` is a coordinate of the dataset along `trial`, such as `mitigation`, `playbook`, `clip`, and `against` a level
    of it as it is printed. Only finished trials count. Raises ConfigError for an axis or a level that there is not, and
    for runs with fewer than `FEWEST` validations.
    """
    known = [str(name) for name, field in sweep.coords.items() if _is_axis(str(field.attrs.get("path", "")))]
    if axis not in known:
        varied = [name for name in known if len(in_order(sweep[name].values)) > 1] or known
        allowed = f"{nearest(axis, varied)}allowed: {', '.join(map(label, varied))}"
        raise ConfigError(f"--axis {label(axis)}: unknown; {allowed}")
    levels = [level for level in in_order(sweep[axis].values) if level == level]
    base = [level for level in levels if word(level) == against]
    if not base or len(levels) < 2:
        allowed = ", ".join(label(word(level)) for level in levels) if base == [] else "an axis with several levels"
        raise ConfigError(f"--axis {axis} --against {label(against)}: nothing to compare; allowed: {allowed}")
    table = trial_table(sweep).assign(row=np.arange(sweep.sizes["trial"]))
    is_clean = (table["fault"] == NO_FAULT.name) & (table["lr"] > 0)
    among = [axis] if axis == "width" else [axis, "width"]
    axes = swept_axes(sweep, table[is_clean], among)[1:]
    table = table.assign(who=seed_numbers(table), place=table.groupby(axes, dropna=False).ngroup() if axes else 0)
    finished = table[table["complete"] & (table["fault"] != LAST_BIT)]
    final, arms = segment_losses(sweep, table), []
    for _, trials in finished.groupby("place"):
        groups = [trials[is_level(trials[axis], level)] for level in (base[0], *(x for x in levels if x != base[0]))]
        without = _recipe(sweep, groups[0], final)
        for group in groups[1:] if without else []:
            if (own := _recipe(sweep, group, final)) and without:
                arms.append(_arm(group, axes, word(group[axis].iloc[0]), own, without))
    return arms


def _is_axis(path: str) -> bool:
    """Whether a field is of the recipe, of which arms are compared at their best rates without a fault."""
    return path != "" and not is_seed(path) and path != "optim.lr" and path.split(".")[0] != "fault"


@dataclass(frozen=True)
class _Recipe:
    """One level's trials at its best rate: curves by seed, and how many of all ended otherwise than trained."""

    rate: float
    curves: dict[int, LossCurve]
    trial: str
    failed: Estimate


def _recipe(sweep: xr.Dataset, trials: pd.DataFrame, final: np.ndarray) -> _Recipe | None:
    clean = trials[(trials["fault"] == NO_FAULT.name) & trials["is_validated"]]
    if not len(clean):
        return None
    rate = RateGrid.of(clean, final).best_rate
    at = trials[trials["lr"] == rate]
    clean = clean[clean["lr"] == rate].drop_duplicates("who")
    failed, number = int((at["outcome"] != TRAINED).sum()), len(at)
    low, high = wilson_interval(failed, number)
    losses = sweep["validation_loss"].isel(trial=clean["row"].to_numpy()).values
    rows = (row for _, row in clean.iterrows())
    curves = {row["who"]: _curve(row, loss) for row, loss in zip(rows, losses, strict=True)}
    share = Estimate(failed / number, float(low), float(high), seeds=number)
    return _Recipe(rate, curves, str(clean["trial"].iloc[0]), share)


def _curve(trial: pd.Series, losses: np.ndarray) -> LossCurve:
    """A run that was not finite any more ends in an infinite loss."""
    at = np.flatnonzero(~np.isnan(losses))
    steps, known = [0, *(at + 1)], [trial["initial_loss"], *losses[at]]
    if trial["nonfinite_step"] == trial["nonfinite_step"]:
        steps, known = [*steps, trial["steps"]], [*known, np.inf]
    elif len(at) < FEWEST:
        reason = f"TRIAL={trial['trial']}: has {len(at)} validations, too few to say when it was as low as another"
        raise ConfigError(f"{reason}; allowed: {FEWEST} or more, by a smaller train.validate_every")
    return LossCurve(np.array(steps, float), np.array(known, float))


def _arm(group: pd.DataFrame, axes: list[str], level: str, own: _Recipe, without: _Recipe) -> TaxedArm:
    both = sorted(own.curves.keys() & without.curves.keys())
    factors = np.array([steps_factor(own.curves[who], without.curves[who]) for who in both])
    factors = np.log(factors[~np.isnan(factors)])
    mean = float(factors.mean()) if len(factors) else np.nan
    low, high = mean_interval(factors[:, None])
    steps = _estimate(np.exp([mean, low, high]), len(factors))
    place = group[axes].iloc[0].to_dict()
    return TaxedArm(place, level, own.rate, without.rate, steps, own.failed, without.failed, own.trial, without.trial)
