"""One number of a group of seeds, and how it differs from that of another group of the same seeds; with intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.measures.statistics import bootstrap, mean_interval

# Of values [k, ..., n], over k and the seeds n: [...].
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A value and its change against a baseline, each with a 95% interval; NaN where there is none."""

    value: float = np.nan
    low: float = np.nan
    high: float = np.nan
    change: float = np.nan
    change_low: float = np.nan
    change_high: float = np.nan
    seeds: int = 0

    def columns(self, name: str) -> dict[str, float]:
        """As columns of a table: `name`, `name_low`, `name_change` and so on."""
        return {name if field == "value" else f"{name}_{field}": number for field, number in vars(self).items()}

    def exponential(self) -> Estimate:
        """Of a mean of logarithms: the geometric mean, and the ratio in place of the difference."""
        numbers = {field: float(np.exp(number)) for field, number in vars(self).items() if field != "seeds"}
        return Estimate(**numbers, seeds=self.seeds)


def paired(values: pd.DataFrame, base: pd.DataFrame | None, statistic: Statistic) -> Estimate:
    """`statistic` of `values` [seed, k], and its difference to that of `base` over what both have of seeds and columns.

    Values may be infinite. A column of nothing but NaN does not count, and neither does a seed with NaN in another. Two
    infinite statistics do not differ. Intervals of finite means are `mean_interval`s, of the differences within each
    seed and column; all others are bootstraps, which draw the seeds of both alike.
    """
    known, seeds, columns = _measured(values)
    is_whole = ~np.isnan(known).any(axis=1)
    known, seeds = known[is_whole], seeds[is_whole]
    if not known.size:
        return Estimate()
    value, is_mean = float(statistic(known.T)), statistic is mean and np.isfinite(known).all()
    interval = mean_interval(known) if is_mean else bootstrap(known.T, statistic)
    alone = Estimate(value, *interval, seeds=len(seeds))
    if base is None:
        return alone
    theirs, base_seeds, base_columns = _measured(base)
    row, column = base_seeds.get_indexer(seeds), base_columns.get_indexer(columns)
    known, theirs = known[np.ix_(row >= 0, column >= 0)], theirs[np.ix_(row[row >= 0], column[column >= 0])]
    is_whole = ~np.isnan(theirs).any(axis=1)
    both = np.stack([known[is_whole].T, theirs[is_whole].T])
    if not both.size:
        return alone

    def difference(drawn: np.ndarray) -> np.ndarray:
        first, second = statistic(drawn[0]), statistic(drawn[1])
        is_alike = np.isinf(first) & (first == second)
        with np.errstate(invalid="ignore"):
            return np.where(is_alike, 0.0, first - second)

    change = float(difference(both))
    if statistic is mean and np.isfinite(both).all():
        low, high = mean_interval((both[0] - both[1]).T)
    else:
        low, high = bootstrap(both, difference)
    return Estimate(value, *interval, change, low, high, len(seeds))


def _measured(frame: pd.DataFrame) -> tuple[np.ndarray, pd.Index, pd.Index]:
    """The values [seed, k] of the columns of `frame` that are not all NaN, its seeds, and those columns."""
    values = frame.to_numpy(dtype=float)
    is_known = ~np.isnan(values).all(axis=0)
    return values[:, is_known], frame.index, frame.columns[is_known]


def mean(values: np.ndarray) -> np.ndarray:
    """Of [k, ..., n], over k and the seeds."""
    return np.asarray(values.mean(axis=0).mean(axis=-1))


def largest_median(values: np.ndarray) -> np.ndarray:
    """Of [k, ..., n]: the median over seeds, and of these the largest."""
    return np.asarray(np.median(values, axis=-1).max(axis=0))
