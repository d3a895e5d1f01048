"""Mitigations against the recipe without one: on the same seeds, rates, widths and faults, by written rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import RateGrid, seed_numbers, segment_losses, swept_axes, trial_table
from analysis.measures.mitigated_faults import felt_faults
from analysis.measures.paired import Estimate, largest_median, mean, paired
from analysis.measures.statistics import wilson_interval
from analysis.measures.step_times import StepTimes, step_times
from analysis.reading.acted import BASELINE, never_acted
from harness.config import NO_FAULT
from harness.objectives.outcome import TRAINED

FAULT_METRICS = ("deviation", "recovery")
UNLIKE_PACKS = 1.25  # by so much the time of a trial-step may differ between packs of unlike sizes: docs/benchmarks.md


@dataclass(frozen=True)
class Metric:
    """How a metric is named, whether less of it is better, and what a change of it is: a ratio or a difference.

    A ratio between 1 / `band` and `band` may have other reasons, and is not told from no change.
    """

    label: str
    units: str
    less_is_better: bool = True
    is_ratio: bool = False
    is_in_map: bool = True
    band: float = 1.0


METRICS = {
    "final_loss": Metric("final loss", "nat/token"),
    "common_loss": Metric("final loss at the baseline's rate", "nat/token", is_in_map=False),
    "stable_rate": Metric("largest stable rate", "", less_is_better=False, is_ratio=True),
    "sensitivity": Metric("LR sensitivity", "nat/token"),
    "uncapped": Metric("LR sensitivity, not capped", "nat/token", is_in_map=False),
    "deviation": Metric("worst deviation", "nat/token"),
    "recovery": Metric("slowest recovery", "steps"),
    "step_time": Metric("step time", "x baseline", is_ratio=True, band=UNLIKE_PACKS),
}


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: its table, the columns that name a row (mitigation, width and others), and its metrics.

    Without anything to compare the table is empty and `reason` says why.
    """

    table: pd.DataFrame
    axes: list[str]
    metrics: dict[str, Metric]
    reason: str = ""

    @property
    def place(self) -> pd.Series:
        """The number of each row's width and other axes beside the mitigation, from 0 on, the largest width last."""
        return self.table.groupby(self.axes[1:], dropna=False).ngroup()

    def is_told(self, metric: str) -> pd.Series:
        """For which rows the interval of the change leaves out "no change" and every change in the metric's band."""
        kind = self.metrics[metric]
        smallest, largest = (1 / kind.band, kind.band) if kind.is_ratio else (0.0, 0.0)
        return (self.table[f"{metric}_change_low"] > largest) | (self.table[f"{metric}_change_high"] < smallest)

    def gain(self, metric: str) -> pd.Series:
        """The change, turned so that more is better: a difference, or the logarithm of a ratio."""
        kind, change = self.metrics[metric], self.table[f"{metric}_change"]
        with np.errstate(divide="ignore"):
            size = np.log(change) if kind.is_ratio else change
        return -size if kind.less_is_better else size


def compare(sweep: xr.Dataset) -> Comparison:
    """Every mitigation of `sweep`, as `analysis.reading.open_sweep` gives it, against the baseline `mitigation=none`.

    One row a mitigation, width and whatever else the sweep varies beside rates, seeds and faults: the baseline first,
    then the mitigations that raise the largest stable rate most, then those that lower the final loss most. Only
    finished trials count. The metrics:

    - `final_loss` (nat/token): mean over seeds of the final validation loss without a fault, at the swept rate at which
      this mean is lowest for the mitigation at that width (`best_rate`; of equal ones the smallest). A run that became
      non-finite counts as infinite. The rate is chosen on the same seeds, which flatters all mitigations alike.
    - `common_loss` (nat/token): the same at the rate that is best for the baseline at that width (`common_rate`).
    - `stable_rate`: per seed, the largest swept rate such that the run at it and at every smaller one was healthy by
      the harness's own criterion (`outcome` is "trained": finite, and it ended with at least half of what it had
      learned; `harness/objectives/outcome.py`); geometric mean over seeds. `stable_rate_bound` is ">=" if some seed is
      stable at every swept rate, so that the value is a lower bound; "<" if none is stable at any, and the value is
      then the smallest rate; "~" if some are not stable at any, which count as one step of the grid below the
      smallest. A seed that is beyond the same end of the grid with and without the mitigation counts as no change.
    - `sensitivity` (nat/token): LR sensitivity, as in `analysis.measures.metrics.lr_sensitivity`; `uncapped`: not
      capped at the loss at initialisation.
    - `deviation` (nat/token): at the common rate, the largest over faults of the median over seeds of the largest
      deviation from the golden twin (`analysis.measures.mitigated_faults`). `deviation.FAULT` is that of one fault.
    - `recovery` (steps): at the common rate, the largest over faults of the median over seeds of the steps from the
      strike until the loss was level with golden for good: at most 0.1 nat/token above, averaged over 10 steps
      (`settling_steps` of `analysis.measures.outcomes`).
      A trial that was not back when its run ended counts as longer than all others, so an infinite median is one beyond
      the run. `recovery.FAULT` is that of one fault; `recovered.FAULT` is the share of trials that were back, with its
      Wilson interval and the number of `trials`; `watched` is for how many steps at most they were watched.
    - `step_time`: median time of a step of a trial without a fault, as a ratio to the baseline's at the same width;
      `step_seconds` is the time itself. A pack is one measurement: the interval is over packs and needs two.
      `step_time_bound` is "~" if its packs hold other mitigations too, which share their time with it. Packs of all
      mitigations train in turns, but whatever else the machine did meanwhile is in their times, and packs of unlike
      sizes differ by up to a quarter, so that less than that is not told. `tests/benchmarks/mitigations.py` compares
      like with like.

    `idle_parts` names the parts of the mitigation that acted in none of its trials of the row, with and without faults
    (`analysis/reading/acted.py`): what such a row shows is not what the mitigation does. METRIC_idle names those that
    acted in none of the trials that the metric is taken from: those at `best_rate`, those with a fault, ...

    Faults that changed nothing and faults without a finite golden run are left out; several trials of a seed that
    differ only in their fault's fields count with their median. A seed that lacks a rate or a fault of its group is
    left out of that metric; METRIC_seeds is the number of those that are left.

    Columns for each METRIC: METRIC, METRIC_low, METRIC_high, METRIC_seeds, and METRIC_change, METRIC_change_low,
    METRIC_change_high: the difference to the baseline (mitigation - baseline), or the ratio for `stable_rate` and
    `step_time`. Both are of the seeds that both have, in pairs, and losses of the same windows of the held-out text.
    Intervals are 95%, and NaN for one seed. Those of means (losses, sensitivity, stable rate) are for other seeds and
    for other text (`analysis.measures.statistics.mean_interval`); those of medians and of losses of which some are
    infinite are percentile bootstraps over seeds, too narrow for few (`analysis.measures.statistics.bootstrap`). What
    the sweep has not measured has no columns: with one rate the stable rate and the sensitivity, without faults
    theirs. Changes are NaN where the baseline has no trials.

    Args:
        sweep: As `analysis.open_sweep` gives it.

    Returns:
        The table, the columns that name a row, and the metrics; without anything to compare, the reason.
    """
    table, axes = _table(sweep)
    clean = table[(table["fault"] == NO_FAULT.name) & table["complete"] & (table["lr"] > 0)]
    if reason := _reason(clean["mitigation"].unique()):
        return Comparison(pd.DataFrame(columns=axes), axes, {}, reason)
    times, final = step_times(sweep, clean), segment_losses(sweep, table)
    by = ["place", "mitigation"]
    grids = {key: RateGrid.of(trials, final) for key, trials in clean.groupby(by)}
    rates = {place: grid.best_rate for (place, name), grid in grids.items() if name == BASELINE}
    felt = felt_faults(sweep, table.assign(wanted=table["lr"] == table["place"].map(rates)))
    faults = dict(iter(felt.groupby(by)))
    groups = {
        key: FinishedTrials(
            trials[axes].iloc[0].to_dict(), trials, grids[key], times.get(key), faults.get(key, felt.iloc[:0])
        )
        for key, trials in clean.groupby(by)
    }
    metrics = _measured(sorted(felt["fault"].unique()), clean["lr"].nunique() > 1, bool(times))
    rows = [_row(group, groups.get((place, BASELINE)), metrics) for (place, _), group in groups.items()]
    return _sorted(Comparison(_with_idle(pd.DataFrame(rows), table, axes, metrics), axes, metrics))


def _with_idle(rows: pd.DataFrame, table: pd.DataFrame, axes: list[str], metrics: Mapping[str, Metric]) -> pd.DataFrame:
    """The rows of a comparison with `idle_parts` and METRIC_idle, "" for none."""
    trials = table.merge(rows[[*axes, "best_rate", "common_rate"]], on=axes)
    is_clean, is_common = trials["fault"] == NO_FAULT.name, trials["lr"] == trials["common_rate"]
    behind = {"": trials["complete"], "final_loss": is_clean & (trials["lr"] == trials["best_rate"])}
    behind |= {"common_loss": is_clean & is_common} | dict.fromkeys(FAULT_METRICS, ~is_clean & is_common)
    idle: dict[str, pd.Series] = {}
    for name in ("", *metrics):
        kind, _, fault = name.partition(".")
        is_behind = behind.get(kind, is_clean) & ((trials["fault"] == fault) if fault else True)
        columns = {"idle_parts": f"{name}_idle" if name else "idle_parts"}
        parts = never_acted(trials[is_behind], axes[1:]).rename(columns=columns)
        idle |= rows[axes].merge(parts, on=axes, how="left")[[*columns.values()]].fillna("").to_dict("series")
    return rows.assign(**idle)


def _table(sweep: xr.Dataset) -> tuple[pd.DataFrame, list[str]]:
    """`trial_table` with more columns, and the axes of the comparison.

    `row` is the trial's number; `place` a number for each width and other axes beside the mitigation; `who` one for
    each set of seeds.
    """
    table = trial_table(sweep)
    axes = swept_axes(sweep, table[table["fault"] == NO_FAULT.name], ("mitigation", "width"))
    table["row"] = np.arange(len(table))
    table["place"] = table.groupby(axes[1:], dropna=False).ngroup()
    table["who"] = seed_numbers(table)
    return table, axes


def _reason(mitigations: np.ndarray) -> str:
    if not len(mitigations):
        return "No comparison: no trial without a fault is finished."
    if len(mitigations) == 1:
        return f"No comparison: the finished trials have one mitigation, {mitigations[0]}."
    if BASELINE not in mitigations:
        return f"No comparison: the baseline, mitigation={BASELINE}, is not among the finished trials."
    return ""


def _measured(faults: list[str], has_rates: bool, has_times: bool) -> dict[str, Metric]:
    is_there = dict.fromkeys(("stable_rate", "sensitivity", "uncapped"), has_rates) | {"step_time": has_times}
    is_there |= dict.fromkeys(FAULT_METRICS, bool(faults))
    return {name: metric for name, metric in METRICS.items() if is_there.get(name, True)} | {
        f"{name}.{fault}": replace(METRICS[name], label=f"{name}, {fault}", is_in_map=False)
        for name in FAULT_METRICS
        for fault in faults
    }


def _sorted(comparison: Comparison) -> Comparison:
    """The baseline first, then by what was gained on average over widths, then by name; widths rising."""
    names = comparison.table["mitigation"]
    keys = {"other": names != BASELINE}
    for metric in ("stable_rate", "final_loss"):
        if metric in comparison.metrics:
            # Rounded, so that equal gains are equal.
            gain = comparison.gain(metric).round(9).groupby(names).transform("mean")
            keys[metric] = -gain.fillna(-np.inf)
    order = comparison.table[comparison.axes].assign(**{f"by {name}": key for name, key in keys.items()})
    order = order.sort_values([*(f"by {name}" for name in keys), *comparison.axes])
    return replace(comparison, table=comparison.table.loc[order.index].reset_index(drop=True))


# --- one row -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinishedTrials:
    """The finished trials of one mitigation and place. Frames [seed, rate] hold those without a fault, and no NaN."""

    names: dict[str, Any]
    trials: pd.DataFrame  # those without a fault
    grid: RateGrid
    times: StepTimes | None
    faults: pd.DataFrame  # what `felt_faults` has of them

    @cached_property
    def stable(self) -> pd.DataFrame:
        """1 or 0."""
        is_stable = (self.trials["outcome"] == TRAINED).astype(float)
        return is_stable.groupby([self.trials["who"], self.trials["lr"]]).mean().unstack("lr").dropna()

    @property
    def has_rates(self) -> bool:
        return bool(self.stable.shape[1] > 1)

    @property
    def stable_rates(self) -> np.ndarray:
        """Per seed, the number of swept rates, from the smallest on, up to which every run was stable: [seed]."""
        return np.asarray(np.cumprod(self.stable.to_numpy() == 1, axis=1).sum(axis=1))

    @property
    def stable_bound(self) -> str:
        """The sign before the geometric mean of stable rates, if some lie beyond the swept ones."""
        is_below, is_above = self.stable_rates == 0, self.stable_rates == self.stable.shape[1]
        if not len(is_below) or not self.has_rates:
            return ""
        return "<" if is_below.all() else "~" if is_below.any() else ">=" if is_above.any() else ""

    @property
    def log_stable_rate(self) -> pd.DataFrame:
        """[seed, 1]; a seed that is stable at no rate counts as one step of the grid below the smallest."""
        rates = np.log(self.stable.columns.to_numpy(dtype=float))
        grid = np.array([2 * rates[0] - rates[1], *rates])
        return pd.DataFrame({"rate": grid[self.stable_rates]}, index=self.stable.index)

    @cached_property
    def fault_values(self) -> dict[str, pd.DataFrame]:
        """`deviation` and `recovery`: [seed, fault]."""
        return {name: self.faults.pivot(index="who", columns="fault", values=name) for name in FAULT_METRICS}


def _row(group: FinishedTrials, baseline: FinishedTrials | None, metrics: dict[str, Metric]) -> dict[str, Any]:
    """What `compare` has of one mitigation and place. Of the baseline itself there is no change."""
    base = None if group is baseline else baseline
    common = baseline.grid.best_rate if baseline else np.nan
    row = group.names | {"best_rate": group.grid.best_rate, "common_rate": common}
    estimates = _clean_estimates(group, base, common) | _fault_estimates(group, base)
    if group.times and baseline and baseline.times:
        estimates["step_time"] = group.times.relative_to(baseline.times) if base else Estimate(1.0)
    for name in metrics:
        row |= estimates.get(name, Estimate()).columns(name)
    if "stable_rate" in metrics:
        row["stable_rate_bound"] = group.stable_bound
    if "step_time" in metrics:
        row["step_seconds"] = group.times.seconds if group.times else np.nan
        row["step_time_bound"] = "~" if group.times and group.times.is_shared else ""
    return row | _recovered(group, [name.partition(".")[2] for name in metrics if name.startswith("recovery.")])


def _clean_estimates(group: FinishedTrials, base: FinishedTrials | None, common: float) -> dict[str, Estimate]:
    base_losses = base.grid.at(common) if base else None
    estimates = {
        "final_loss": paired(group.grid.at(group.grid.best_rate), base_losses, mean),
        "common_loss": paired(group.grid.at(common), base_losses, mean),
    }
    if group.has_rates:
        other = base if base and base.has_rates else None
        rate = paired(group.log_stable_rate, other.log_stable_rate if other else None, mean).exponential()
        if group.stable_bound == "<":
            rate = replace(rate, value=float(group.stable.columns[0]), low=np.nan, high=np.nan)
        estimates["stable_rate"] = rate
        for name, is_capped in {"sensitivity": True, "uncapped": False}.items():
            theirs = other.grid.sensitivity(is_capped) if other else None
            estimates[name] = paired(group.grid.sensitivity(is_capped), theirs, mean)
    return estimates


def _fault_estimates(group: FinishedTrials, base: FinishedTrials | None) -> dict[str, Estimate]:
    estimates = {}
    for name in FAULT_METRICS:
        values, theirs = group.fault_values[name], base.fault_values[name] if base else None
        estimates[name] = paired(values, theirs, largest_median)
        for fault in values:
            other = theirs[[fault]] if theirs is not None and fault in theirs else None
            estimates[f"{name}.{fault}"] = paired(values[[fault]], other, largest_median)
    return estimates


def _recovered(group: FinishedTrials, faults: list[str]) -> dict[str, Any]:
    """For how many steps faulty trials were watched, and of each fault the share that recovered."""
    felt = group.faults
    row: dict[str, Any] = {"watched": felt["watched"].max()} if faults else {}
    for fault in faults:
        recovered, trials = felt.loc[felt["fault"] == fault, ["recovered", "trials"]].sum()
        low, high = wilson_interval(recovered, trials)
        share, name = recovered / trials if trials else np.nan, f"recovered.{fault}"
        row |= {name: share, f"{name}_low": float(low), f"{name}_high": float(high), f"{name}_trials": int(trials)}
    return row
