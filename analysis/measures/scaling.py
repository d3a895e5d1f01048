"""How a metric changes with the size of a model: slopes, laws with intervals over seeds, and what they foretell.

A law is fitted to the means over seeds. Its intervals draw seeds (bootstrap), so they say how far other seeds would
move it, and not whether the law holds. Whether it does is asked of the largest size, foretold from the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import RateGrid, seed_numbers, segment_losses, swept_axes, trial_table
from analysis.measures.statistics import CONFIDENCE, draws
from analysis.reading.levels import word
from harness.basics.errors import nearest
from harness.basics.printing import label
from harness.config import NO_FAULT, ConfigError
from harness.objectives.outcome import TRAINED

PARAMETERS = "parameters"
SIZES = ("width", "depth")  # which go into the number of parameters
FEWEST = 3  # sizes
EXPONENTS = np.geomspace(0.02, 4.0, 160)  # that are tried for the law with an offset
_SIGNAL = re.compile(r"largest\((\w+)\)")


@dataclass(frozen=True)
class ScaledMetric:
    """A number of each seed at one size, and whether it is fitted as a logarithm. `has_offset`: it has a floor."""

    units: str
    is_log: bool = False
    has_offset: bool = False


METRICS = {
    "loss": ScaledMetric("nat/token", has_offset=True),
    "stable_rate": ScaledMetric("", is_log=True),
    "best_rate": ScaledMetric("", is_log=True),
    "sensitivity": ScaledMetric("nat/token"),
}


def metric_of(name: str) -> ScaledMetric:
    """A metric by name, or `largest(SIGNAL)`. Raises ConfigError."""
    if name in METRICS:
        return METRICS[name]
    if _SIGNAL.fullmatch(name):
        return ScaledMetric("", is_log=True)
    allowed = f"{nearest(name, METRICS)}allowed: {', '.join(METRICS)}, largest(SIGNAL)"
    raise ConfigError(f"METRIC={label(name)}: unknown; {allowed}")


@dataclass(frozen=True)
class Estimated:
    """A number with a 95% interval over seeds."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, drawn: np.ndarray) -> Estimated:
        """From what bootstrap samples gave; without an end where one of them gave nothing."""
        if not len(drawn) or np.isnan(drawn).any():
            return cls(value, np.nan, np.nan)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(drawn, [tail, 1 - tail])
        return cls(value, float(low), float(high))

    def exponential(self) -> Estimated:
        """Of a logarithm."""
        return Estimated(*map(float, np.exp([self.value, self.low, self.high])))


@dataclass(frozen=True)
class Scaling:
    """One metric of one arm: `values` [sizes, seeds] at rising `sizes`, logarithms where the metric `is_log`.

    NaN: that seed has no such number there, such as a largest stable rate beyond the rates that were tried.
    """

    arm: Mapping[str, Any]
    metric: str
    against: str
    sizes: np.ndarray
    values: np.ndarray

    @property
    def kind(self) -> ScaledMetric:
        return metric_of(self.metric)

    @property
    def has_offset(self) -> bool:
        """Whether its law has one: of a metric with a floor, at four sizes or more."""
        return self.kind.has_offset and len(self.sizes) > FEWEST

    @property
    def law(self) -> str:
        """In letters, y at size x."""
        if self.has_offset:
            return "c + a x^-b"
        return "a x^b" if self.kind.is_log else "a + b log2 x"

    @cached_property
    def means(self) -> np.ndarray:
        """Over seeds, [sizes]."""
        return np.asarray(np.nanmean(self.values, axis=1))

    @cached_property
    def drawn(self) -> np.ndarray:
        """Means of bootstrap samples of the seeds, [sizes, draws]; NaN where a sample has no seed that counts."""
        seeds = self.values.shape[1]
        if seeds < 2:
            return np.empty((len(self.sizes), 0))
        (which,) = draws((seeds,))
        picked = self.values[:, which]
        is_known = ~np.isnan(picked)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(is_known, picked, 0.0).sum(-1) / is_known.sum(-1))

    def _law(self, sizes: np.ndarray, means: np.ndarray) -> Callable[[float], np.ndarray]:
        """What the law says at another size, from means [sizes, n]: [n]."""
        if self.has_offset and len(sizes) > FEWEST - 1:
            c, a, b = offset_law(sizes / sizes[0], means)
            return lambda size: np.asarray(c + a * (size / sizes[0]) ** -b)
        start, slope = line(np.log2(sizes), means)
        return lambda size: np.asarray(start + slope * np.log2(size))

    def slope(self) -> Estimated:
        """By how much it rises with each doubling; of a logarithm by what factor."""
        found = Estimated.of(*self._both(lambda means: line(np.log2(self.sizes), means)[1]))
        return found.exponential() if self.kind.is_log else found

    def parameters(self) -> tuple[Estimated, Estimated] | None:
        """c and b of the law with an offset."""
        if not self.has_offset:
            return None
        c, _, b = offset_law(self.sizes / self.sizes[0], self.means[:, None])
        of_c, _, of_b = offset_law(self.sizes / self.sizes[0], self.drawn)
        return Estimated.of(float(c[0]), of_c), Estimated.of(float(b[0]), of_b)

    def at(self, size: float) -> Estimated:
        """What the law says at a size, whether or not it was measured there."""
        found = Estimated.of(*self._both(lambda means: self._law(self.sizes, means)(size)))
        return found.exponential() if self.kind.is_log else found

    def foretold(self) -> tuple[Estimated, float, bool | None]:
        """The largest size from the others: what the law says, what was measured, and whether both agree.

        They do if the 95% interval of their difference, with the same seeds drawn for both, has 0 in it; None: there is
        no interval, or too few sizes are left for the law.
        """
        sizes, last = self.sizes[:-1], self.sizes[-1]
        measured = float(self.means[-1])
        if len(sizes) < FEWEST - (not self.has_offset):
            return Estimated(np.nan, np.nan, np.nan), self._shown(measured), None
        value = float(self._law(sizes, self.means[:-1, None])(last)[0])
        drawn = self._law(sizes, self.drawn[:-1])(last) if self.drawn.shape[1] else np.empty(0)
        found = Estimated.of(value, drawn)
        apart = Estimated.of(value - measured, drawn - self.drawn[-1] if len(drawn) else drawn)
        agrees = None if np.isnan(apart.low) else apart.low <= 0 <= apart.high
        return (found.exponential() if self.kind.is_log else found), self._shown(measured), agrees

    def _shown(self, value: float) -> float:
        return float(np.exp(value)) if self.kind.is_log else value

    def _both(self, statistic: Callable[[np.ndarray], np.ndarray]) -> tuple[float, np.ndarray]:
        """Of the means [sizes, 1], and of those of every draw."""
        return float(statistic(self.means[:, None])[0]), statistic(self.drawn)


def line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intercept and slope by least squares, [n] each, of y [k, n] at x [k]."""
    centred = x - x.mean()
    slope = (centred[:, None] * y).sum(0) / (centred**2).sum()
    return y.mean(0) - slope * x.mean(), slope


def offset_law(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """c, a and b of c + a x^-b by least squares, [n] each, of y [k, n] at x [k]; b is one of `EXPONENTS`.

    Of each exponent the other two are linear, so nothing has to converge.
    """
    best = np.full(y.shape[1], np.inf)
    c, a, b = (np.full(y.shape[1], np.nan) for _ in range(3))
    for exponent in EXPONENTS:
        start, factor = line(x**-exponent, y)
        missed = ((start + factor * x[:, None] ** -exponent - y) ** 2).sum(0)
        is_better = missed < best
        best = np.where(is_better, missed, best)
        for kept, new in ((c, start), (a, factor), (b, np.full_like(b, exponent))):
            kept[is_better] = new[is_better]
    return c, a, b


# --- from trials ----------------------------------------------------------------------------------------------------


def scalings(
    sweep: xr.Dataset,
    metric: str = "loss",
    against: str = "width",
    weights: Mapping[str, int] | None = None,
) -> list[Scaling]:
    """A metric against a size, of each mitigation and whatever else the sweep varies.

    - `loss` (nat/token): final validation loss at the arm's best rate at that size.
    - `stable_rate`: the middle, on a log scale, between a seed's largest stable rate and the next that was tried; a
      seed that is stable at all or at none has none. It needs two rates.
    - `best_rate`: where the parabola through a seed's lowest loss and both neighbours is lowest; needs three rates.
    - `sensitivity` (nat/token): LR sensitivity (`analysis.measures.metrics.lr_sensitivity`).
    - `largest(SIGNAL)`: the largest value over the run at the best rate.

    Only finished trials without a fault count. `against` is a coordinate of positive numbers, or `parameters`, of which
    `weights` has the number by trial. An arm with fewer than three sizes, or with a size at which no seed has the
    metric, is left out. Raises ConfigError.
    """
    metric_of(metric)
    table = _table(sweep, against, weights)
    among = SIZES if against == PARAMETERS else (against,)
    axes = swept_axes(sweep, table, ("mitigation", *(name for name in among if name in table)))
    axes = [name for name in axes if name not in among]
    final, found = segment_losses(sweep, trial_table(sweep)), []
    read = _reader(metric, sweep, final)
    for _, arm in table.groupby(axes, dropna=False):
        columns = {float(size): read(group) for size, group in arm.groupby("size")}
        sizes = sorted(columns)
        values = pd.DataFrame({size: columns[size] for size in sizes}).to_numpy(float).T
        if len(sizes) >= FEWEST and (~np.isnan(values)).any(axis=1).all():
            seen = values[:, ~np.isnan(values).all(axis=0)]
            found.append(Scaling(arm[axes].iloc[0].to_dict(), metric, against, np.array(sizes), seen))
    return found


def _table(sweep: xr.Dataset, against: str, weights: Mapping[str, int] | None) -> pd.DataFrame:
    """Finished trials without a fault, with `size`, `who` and `row`. Raises ConfigError."""
    table = trial_table(sweep).assign(row=np.arange(sweep.sizes["trial"]))
    table["who"] = seed_numbers(table)
    if against == PARAMETERS:
        size = table["trial"].map(weights or {})
    else:
        known = [name for name in table if name in sweep.coords and sweep[name].attrs.get("path")]
        numeric = [name for name in known if pd.api.types.is_numeric_dtype(table[name]) and name not in ("seed", "lr")]
        if against not in numeric:
            varied = [name for name in numeric if table[name].nunique() > 1] or numeric
            raise ConfigError(f"--against {label(against)}: no size; allowed: {', '.join([*varied, PARAMETERS])}")
        size = table[against].astype(float)
    table = table.assign(size=size)
    is_ours = table["complete"] & (table["fault"] == NO_FAULT.name) & table["is_validated"] & (table["lr"] > 0)
    return table[is_ours & (table["size"] > 0)]


def _reader(metric: str, sweep: xr.Dataset, final: np.ndarray) -> Callable[[pd.DataFrame], pd.Series]:
    """What gives a number for each seed, by `who`, of the trials of one arm and size. Raises ConfigError."""
    if signal := _SIGNAL.fullmatch(metric):
        name = signal[1]
        if name not in sweep or "step" not in sweep[name].dims:
            known = sorted(str(other) for other, values in sweep.data_vars.items() if "step" in values.dims)
            raise ConfigError(f"METRIC={label(metric)}: no such signal; allowed: {', '.join(map(label, known))}")

        def largest(trials: pd.DataFrame) -> pd.Series:
            at_best = trials[trials["lr"] == RateGrid.of(trials, final).best_rate]
            values = sweep[name].isel(trial=at_best["row"].to_numpy()).transpose("trial", "step", ...).values
            flat = np.abs(values.reshape(len(values), -1).astype(float))
            flat[~np.isfinite(flat)] = np.nan
            with np.errstate(divide="ignore"):
                found = np.log(np.nanmax(np.where(np.isnan(flat).all(1, keepdims=True), 0.0, flat), axis=1))
            found[~np.isfinite(found)] = np.nan
            return pd.Series(found, index=at_best["who"]).groupby(level=0).mean()

        return largest
    return {"loss": _loss, "stable_rate": _stable_rate, "best_rate": _best_rate, "sensitivity": _sensitivity}[metric](
        final
    )


Reader = Callable[[pd.DataFrame], pd.Series]


def _loss(final: np.ndarray) -> Reader:
    def read(trials: pd.DataFrame) -> pd.Series:
        grid = RateGrid.of(trials, final)
        values = grid.at(grid.best_rate).mean(axis=1)
        return values.where(np.isfinite(values))

    return read


def _sensitivity(final: np.ndarray) -> Reader:
    def read(trials: pd.DataFrame) -> pd.Series:
        grid = RateGrid.of(trials, final)
        return grid.sensitivity().mean(axis=1) if len(grid.rates) > 1 else pd.Series(np.nan, index=grid.seeds)

    return read


def _stable_rate(final: np.ndarray) -> Reader:
    def read(trials: pd.DataFrame) -> pd.Series:
        is_stable = (trials["outcome"] == TRAINED).astype(float)
        by_rate = is_stable.groupby([trials["who"], trials["lr"]]).min().unstack("lr").dropna()
        rates = np.log(by_rate.columns.to_numpy(float))
        count = np.cumprod(by_rate.to_numpy() == 1, axis=1).sum(axis=1)
        middles = np.concatenate([[np.nan], (rates[1:] + rates[:-1]) / 2, [np.nan]])
        return pd.Series(middles[count], index=by_rate.index)

    return read


def _best_rate(final: np.ndarray) -> Reader:
    def read(trials: pd.DataFrame) -> pd.Series:
        grid = RateGrid.of(trials, final)
        losses, rates = grid.capped.mean(axis=2), np.log(grid.rates)
        found = np.full(len(losses), np.nan)
        for seed, loss in enumerate(losses):
            best = int(loss.argmin())
            if 0 < best < len(rates) - 1:
                found[seed] = vertex(rates[best - 1 : best + 2], loss[best - 1 : best + 2])
        return pd.Series(found, index=grid.seeds)

    return read


def vertex(x: np.ndarray, y: np.ndarray) -> float:
    """Of the parabola through three points, the middle one of which is no higher than the others."""
    left, right = (y[0] - y[1]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if not left + right:
        return float(x[1])
    return float((x[0] + x[1]) / 2 + (x[2] - x[0]) / 2 * left / (left + right))


def arm_words(arm: Mapping[str, Any]) -> str:
    """An arm as tables and figures name it."""
    first, *others = arm.items()
    return ", ".join([word(first[1]), *(f"{name} = {word(value)}" for name, value in others)])


def curve(found: Scaling, largest: float) -> Iterator[tuple[float, Estimated]]:
    """The law between the smallest size and the largest, for a figure."""
    for size in np.geomspace(found.sizes[0], max(largest, found.sizes[-1]), 40):
        yield float(size), found.at(float(size))


def check_sizes(values: Sequence[float]) -> None:
    """Raises ConfigError for a size that is not positive."""
    for value in values:
        if not 0 < value < np.inf:
            raise ConfigError(f"--to {value:g}: out of range; allowed: a size above 0")
