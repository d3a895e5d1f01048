"""What a claim compares: a number of each seed, from the finished trials of one arm in one cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.mitigated_faults import largest_deviation
from analysis.measures.outcomes import IDLE, MASKED, UNJUDGED, outcomes_and_notes
from analysis.measures.scaling import vertex
from harness.config import Trial
from harness.objectives.outcome import TRAINED
from injectors.batch import BatchFault
from sweeps.claims.summaries import FORMS, SignalSummary, summary_of
from sweeps.compose.places import unknown_option

AFTERMATH = "aftermath"
_RATE_BELOW = re.compile(r"rate_below\((\d+(?:\.\d+)?)\)")
LEAST_DEVIATION = 1e-3  # nat/token: what is smaller counts as so much, for a ratio of nothing says nothing


@dataclass(frozen=True)
class SeedMetric:
    """`bounds` of the rows of `analysis.measures.metrics.trial_table`: `low` and `high`, by seed.

    A seed's number lies between them; they are one where it was measured itself. A ratio is of logarithms. What a
    `summary` finds in each trial is a column of its name. `is_of_faults`: the rows have what
    `analysis.measures.outcomes` adds. `version` rises with what the metric means: it is a part of a claim's
    registration, so that a verdict by another meaning than that of before its trials is exploratory.
    """

    unit: str
    bounds: Callable[[pd.DataFrame], pd.DataFrame]
    is_ratio: bool = False
    summary: SignalSummary | None = None
    is_of_faults: bool = False
    version: int = 1

    def with_columns(self, table: pd.DataFrame, own: xr.Dataset) -> pd.DataFrame:
        """The rows of the trials of `own` with the column that this reads."""
        return table if self.summary is None else table.assign(**{self.summary.name: self.summary.of(own)})


Values = Callable[[pd.DataFrame], pd.Series]


def _measured(values: Values) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def bounds(table: pd.DataFrame) -> pd.DataFrame:
        found = values(table)
        return pd.DataFrame({"low": found, "high": found})

    return bounds


def _by_rate(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """[seed, lr]; seeds that lack a rate are left out, because a mean over fewer rates is another number."""
    return table.pivot_table(index="seed", columns="lr", values=column, aggfunc="mean").dropna()


def _by_seed(table: pd.DataFrame, values: pd.Series) -> pd.Series:
    """The mean over a seed's trials; without seeds that lack one, because a mean over fewer is another number."""
    found = values.groupby(table["seed"]).agg(["mean", "count"])
    return found["mean"][(found["count"] == found["count"].max()) & (found["count"] > 0)]


# --- of a range of learning rates --------------------------------------------------------------------------------


def _best_loss(table: pd.DataFrame) -> pd.DataFrame:
    """Final validation loss at the arm's own best rate, which is that of the lowest mean over seeds.

    Where that is the first or the last rate, a better one may lie beyond it, and the loss is known from above alone.
    """
    losses = _by_rate(table, "capped_loss")
    if not losses.size:
        return pd.DataFrame({"low": [], "high": []}, dtype=float)
    best = int(losses.mean().to_numpy().argmin())
    high = losses.iloc[:, best]
    return pd.DataFrame({"low": high if 0 < best < losses.shape[1] - 1 else -np.inf, "high": high})


def _sensitivity(table: pd.DataFrame) -> pd.Series:
    """Wortsman et al. 2023 (arXiv 2309.14322), section 2: mean over rates less the best, losses capped at the first."""
    losses = _by_rate(table, "capped_loss")
    return losses.mean(axis=1) - losses.min(axis=1)


def _stable_rate(table: pd.DataFrame) -> pd.DataFrame:
    """Logarithms of the largest rate at which a seed trained, with all smaller ones, and of the next of the sweep.

    The edge lies between both; above the last rate where the seed trained at all, and below the first where at none.
    """
    trained = _by_rate(table.assign(is_trained=(table["outcome"] == TRAINED).astype(float)), "is_trained")
    if not trained.size:
        return pd.DataFrame({"low": [], "high": []}, dtype=float)
    ends = np.concatenate([[-np.inf], np.log(np.array(trained.columns, float)), [np.inf]])
    stable = np.minimum.accumulate(trained.to_numpy(), axis=1).sum(axis=1).astype(int)
    return pd.DataFrame({"low": ends[stable], "high": ends[stable + 1]}, index=trained.index)


def _rate_below(table: pd.DataFrame, loss: float) -> pd.DataFrame:
    """Logarithms of the largest rate at which a seed ends below a loss, as at all from its best on, and of the next.

    A model that has learned how often each token occurs counts as trained, and may have learned nothing else.
    """
    ended = table["capped_loss"].mask(table["outcome"] != TRAINED, np.inf)
    losses = _by_rate(table.assign(ended=ended), "ended")
    rates = np.log(np.array(losses.columns, float))
    found = pd.DataFrame({"low": -np.inf, "high": rates[0] if len(rates) else np.inf}, index=losses.index)
    ends = np.append(rates, np.inf)
    for seed, of_seed in zip(losses.index, losses.to_numpy(), strict=True):
        is_below, best = of_seed < loss, int(of_seed.argmin())
        if is_below[best]:
            last = best + int(np.argmin(np.append(is_below[best:], False))) - 1
            found.loc[seed] = ends[last], ends[last + 1]
    return found


def _best_rate(table: pd.DataFrame) -> pd.DataFrame:
    """Logarithm of a seed's best rate: where the parabola through its lowest loss and both neighbours is lowest.

    Where the lowest loss is that of the first or last rate, the best one lies somewhere beyond the rate next to it.
    """
    losses = _by_rate(table, "capped_loss")
    found = pd.DataFrame({"low": -np.inf, "high": np.inf}, index=losses.index)
    rates = np.log(np.array(losses.columns, float))
    for seed, loss in zip(losses.index, losses.to_numpy(), strict=True):
        best = int(loss.argmin())
        if 0 < best < len(loss) - 1:
            found.loc[seed] = vertex(rates[best - 1 : best + 2], loss[best - 1 : best + 2])
        elif best and len(loss) > 1:
            found.loc[seed, "low"] = rates[-2]
        elif len(loss) > 1:
            found.loc[seed, "high"] = rates[1]
    return found


def _lost(table: pd.DataFrame) -> pd.Series:
    """Share of the rates at which a seed did not train."""
    return _by_rate(table.assign(lost=(table["outcome"] != TRAINED).astype(float)), "lost").mean(axis=1)


# --- of faults ---------------------------------------------------------------------------------------------------


def _nonfinite(table: pd.DataFrame) -> pd.Series:
    """Share of a seed's trials that became non-finite."""
    return _by_seed(table, table["nonfinite_step"].notna().astype(float))


def _deviation(table: pd.DataFrame, column: str = "deviation_max") -> pd.DataFrame:
    """Mean logarithm of the largest deviation of the loss from golden; open above where a trial became non-finite."""
    least = np.log(np.maximum(table[column].fillna(0.0), LEAST_DEVIATION))
    most = least.mask(table["nonfinite_step"].notna(), np.inf)
    is_known = table["fault_outcome"].ne(UNJUDGED)
    low, high = (_by_seed(table, values.where(is_known)) for values in (least, most))
    return pd.DataFrame({"low": low, "high": high})


def _harmed(table: pd.DataFrame) -> pd.Series:
    """Share of a seed's faults after which the loss stayed 0.1 nat/token above golden, or was lost.

    Of those that did something. A step that is skipped leaves a trace for good, and is no harm by itself.
    """
    told = table[~table["fault_outcome"].isin([IDLE, UNJUDGED])]
    is_harmed = told["settling_steps"].isna() & told["fault_outcome"].ne(MASKED)
    return is_harmed.astype(float).groupby(told["seed"]).mean()


METRICS = {
    "best_loss": SeedMetric("nat/token", _best_loss, version=2),
    "sensitivity": SeedMetric("nat/token", _measured(_sensitivity)),
    "stable_rate": SeedMetric("ratio", _stable_rate, is_ratio=True),
    "best_rate": SeedMetric("ratio", _best_rate, is_ratio=True),
    "lost": SeedMetric("share", _measured(_lost)),
    "nonfinite": SeedMetric("share", _measured(_nonfinite)),
    "deviation": SeedMetric("ratio", _deviation, is_ratio=True, is_of_faults=True),
    "aftermath": SeedMetric("ratio", partial(_deviation, column=AFTERMATH), is_ratio=True, is_of_faults=True),
    "harmed": SeedMetric("share", _measured(_harmed), is_of_faults=True, version=2),
}
"""By name: what is compared between two arms, seed by seed."""


def metric_of(name: str, where: str = "metric") -> SeedMetric:
    """The metric of this name, or what is read of a signal, such as `largest(grad_norm)`. Raises ConfigError."""
    if name in METRICS:
        return METRICS[name]
    if loss := _RATE_BELOW.fullmatch(name):
        return SeedMetric("ratio", partial(_rate_below, loss=float(loss[1])), is_ratio=True)
    summary = summary_of(name, where)
    if summary is None:
        raise unknown_option(where, name, [*METRICS, "rate_below(LOSS)", *(f"{form}(SIGNAL)" for form in FORMS)])
    values = _measured(lambda table: _by_seed(table, table[summary.name]))
    unit, version = "ratio" if summary.is_ratio else "share", FORMS[summary.form].version
    return SeedMetric(unit, values, summary.is_ratio, summary, version=version)


def per_doubling(metric: SeedMetric, table: pd.DataFrame, axis: str) -> pd.DataFrame:
    """`metric.bounds` of how much a seed's number rises with each doubling of a coordinate, by least squares.

    Of seeds that have it at every value. Of a ratio, which is of logarithms, that is of the factor.
    """
    found = {float(np.log2(value)): metric.bounds(group) for value, group in table.groupby(axis)}
    away = np.array(list(found)) - np.mean(list(found))
    seeds = sorted(set.intersection(*(set(bounds.dropna().index) for bounds in found.values())))
    slope = pd.DataFrame({"low": 0.0, "high": 0.0}, index=seeds)
    for weight, bounds in zip(away / (away**2).sum(), found.values(), strict=True):
        if abs(weight) > 1e-12:  # the middle of the range says nothing, even where it is open
            ends = ("low", "high") if weight > 0 else ("high", "low")
            slope += weight * bounds.loc[seeds, list(ends)].set_axis(["low", "high"], axis=1)
    return slope


def with_outcomes(sweep: xr.Dataset, metrics: list[SeedMetric]) -> xr.Dataset:
    """The sweep with what each fault did, where one of these metrics asks."""
    if not any(metric.is_of_faults for metric in metrics):
        return sweep
    found, _ = outcomes_and_notes(sweep)
    return found.assign_coords({AFTERMATH: ("trial", largest_deviation(found))})


def poisoned_reason(name: str, trials: Sequence[Trial]) -> str:
    """Why a metric says nothing about the models of these trials; empty if it does."""
    if name != "deviation" or not any(isinstance(trial.fault, BatchFault) for trial in trials):
        return ""
    return "deviation: is that of the loss on a poisoned batch, which says nothing about the model; allowed: aftermath"
