"""When runs spike for the first time, counted from the end of their warm-up: how likely a step is, if none was before.

A spike is a loss of more than `RISE` times the median of the last `BEFORE`, or one that is not finite. Li et al. 2021
(arXiv 2108.06084) hold it against the lowest loss before, which the noise of small batches exceeds in any run. Times
are in multiples of a run's warm-up, the steps until its learning rate is highest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from numpy.lib.stride_tricks import sliding_window_view
from scipy.stats import binomtest, chi2

from analysis.measures.detectors import taken
from analysis.measures.early_warning import unaided
from analysis.measures.statistics import CONFIDENCE
from analysis.reading.twins import blocks

RISE, BEFORE = 1.2, 10
EDGES = (0.0, 0.25, 0.5, 0.8, 1.5, 2.5, 4.0, 7.0, 12.0, 20.0)  # of spans, in multiples of the warm-up
NEAR = (0.8, 1.5)  # the span that is called the end of the warm-up
PER = 1000  # steps


def first_spike(loss: np.ndarray, nonfinite_step: float) -> float:
    """The step of the first spike of a run with these losses [steps], NaN where no step was taken; NaN: none."""
    known = np.flatnonzero(~np.isnan(loss))
    known = known[known < nonfinite_step] if nonfinite_step == nonfinite_step else known
    if len(known) <= BEFORE:
        return nonfinite_step
    values = loss[known].astype(np.float64)
    usual = np.median(sliding_window_view(values[:-1], BEFORE), axis=1)
    is_spike = ~(values[BEFORE:] <= RISE * usual)
    return float(known[BEFORE + int(is_spike.argmax())]) if is_spike.any() else nonfinite_step


def first_spikes(sweep: xr.Dataset) -> pd.DataFrame:
    """The finished runs without a fault, a playbook or an instant warm-up, a row each; no run lost before `BEFORE`.

    Columns: `trial`, its number along `trial`; `warmup`, in steps; `spike`, the step of its first one, NaN: none;
    `watched`: after how many steps that is known.
    """
    rows = unaided(sweep)["trial"].to_numpy()
    found = []
    for block in blocks(sweep["learning_rate"], rows):
        part = sweep.isel(trial=block)
        is_taken = taken(part)
        rates, losses = (part[name].transpose("trial", "step").values for name in ("learning_rate", "loss"))
        losses = np.where(is_taken, losses, np.nan)
        each = zip(block, rates, losses, part["nonfinite_step"].values.astype(float), part["steps"].values, strict=True)
        for row, rate, loss, broken, steps in each:
            warmup = 1 + int(np.nan_to_num(rate, nan=-np.inf).argmax())
            spike = first_spike(loss, broken)
            found.append((int(row), warmup, spike, float(steps) if np.isnan(spike) else spike + 1))
    table = pd.DataFrame(found, columns=["trial", "warmup", "spike", "watched"])
    return table[(table["warmup"] > 1) & (table["watched"] > BEFORE)].reset_index(drop=True)


def spans(runs: pd.DataFrame, edges: tuple[float, ...] = EDGES) -> pd.DataFrame:
    """A row a span: `low` and `high` in multiples of the warm-up, `steps` at risk, `spikes`, and the hazard.

    `hazard` are first spikes in a thousand steps of runs without one so far, with `hazard_low` and `hazard_high`, the
    exact 95% interval of a Poisson rate (Garwood 1936). Spans in which no run was watched are left out.
    A run is at risk from step `BEFORE` on: nothing is usual earlier, so what happens there is not counted.
    """
    begin, end = (runs["warmup"].to_numpy()[:, None] * np.array(part) for part in (edges[:-1], edges[1:]))
    watched, spike = runs["watched"].to_numpy()[:, None], runs["spike"].to_numpy()[:, None]
    begin, end = np.maximum(np.ceil(begin), BEFORE), np.ceil(end)
    steps = np.clip(np.minimum(end, watched) - begin, 0, None).sum(0)
    spikes = ((spike >= begin) & (spike < end)).sum(0)
    tail = (1 - CONFIDENCE) / 2
    low, high = chi2.ppf(tail, 2 * spikes) / 2, chi2.ppf(1 - tail, 2 * spikes + 2) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = {
            "low": edges[:-1],
            "high": edges[1:],
            "steps": steps.astype(int),
            "spikes": spikes,
            "hazard": PER * spikes / steps,
            "hazard_low": PER * np.nan_to_num(low) / steps,
            "hazard_high": PER * high / steps,
        }
    return pd.DataFrame(columns)[steps > 0].reset_index(drop=True)


@dataclass(frozen=True)
class HazardRatio:
    """Of spikes near the end of the warm-up over elsewhere, with an exact 95% interval; NaN where there were none."""

    value: float
    low: float
    high: float
    near: int
    elsewhere: int


def hazard_ratio(runs: pd.DataFrame) -> HazardRatio:
    """The hazard in the span `NEAR` over that before and after it.

    Of all spikes the share near the end is binomial, if both hazards are constant (conditional test of two Poisson
    rates; Clopper and Pearson 1934).
    """
    table = spans(runs, (0.0, *NEAR, np.inf))
    is_near = table["low"] == NEAR[0]
    near, elsewhere = int(table.loc[is_near, "spikes"].sum()), int(table.loc[~is_near, "spikes"].sum())
    steps = table.loc[is_near, "steps"].sum(), table.loc[~is_near, "steps"].sum()
    if not near + elsewhere or not all(steps):
        return HazardRatio(np.nan, np.nan, np.nan, near, elsewhere)
    ends = binomtest(near, near + elsewhere).proportion_ci(CONFIDENCE)
    with np.errstate(divide="ignore"):
        shares = np.array([near / (near + elsewhere), ends.low, ends.high])
        value, low, high = shares / (1 - shares) * steps[1] / steps[0]
    return HazardRatio(float(value), float(low), float(high), near, elsewhere)
