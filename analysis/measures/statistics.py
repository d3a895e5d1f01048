"""Shares and means with their uncertainty, and medians of what was not always seen to end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from scipy.special import ndtri, stdtrit

from analysis.measures.outcomes import IDLE, OUTCOMES, outcomes
from harness.config import NO_FAULT
from harness.config.names import LAST_BIT

CONFIDENCE = 0.95
RESAMPLES = 2000


def wilson_interval(counts: Any, totals: Any) -> tuple[np.ndarray, np.ndarray]:
    """95% score interval of a share, `counts` of `totals` (Wilson 1927); arrays or numbers, NaN for a total of 0.

    It stays within 0 and 1 and has a width even where the share is 0 or 1, as the rates of rare outcomes are.
    """
    k, n = np.asarray(counts, dtype=float), np.asarray(totals, dtype=float)
    z = ndtri((1 + CONFIDENCE) / 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        centre = (k + z**2 / 2) / (n + z**2)
        reach = z / (n + z**2) * np.sqrt(k * (n - k) / n + z**2 / 4)
        low, high = np.maximum(centre - reach, 0), np.minimum(centre + reach, 1)
    # At the ends rounding would leave 1e-17 where the interval touches 0 or 1.
    return np.where(k == 0, low * 0, low), np.where(k == n, high * 0 + 1, high)


def studied(sweep: xr.Dataset) -> xr.Dataset:
    """The faulty trials of a campaign: all but those that measure the clean envelope."""
    fault = sweep["fault"].values
    return sweep.isel(trial=np.flatnonzero((fault != NO_FAULT.name) & (fault != LAST_BIT)))


def rates(sweep: xr.Dataset, by: Sequence[str] = ()) -> pd.DataFrame:
    """How often faults had each outcome, with 95% Wilson intervals: one row a group and outcome.

    Trials with the fault `last_bit`, which are the yardstick, do not count.

    Args:
        sweep: As `analysis.open_sweep` gives it, with or without `analysis.outcomes`.
        by: Coordinates along `trial` that make the groups, such as `struck_site`, `struck_tensor` and `struck_bit`;
        none: one group of all. Missing values make a group of their own.

    Returns:
        Columns: those of `by`, then `outcome` (masked, recovered, lingering, divergent, non-finite, all five in each
        group), `count`, `trials` (those that have one of the five), `idle` (whose fault changed nothing), `left_out`
        (unfinished, or without a golden run to judge them by), `share` = count / trials, `low` and `high`; the last
        three are NaN where no trial is judged.

    Raises:
        KeyError: A name of `by` is no coordinate of the sweep.
    """
    faulty = studied(sweep if "fault_outcome" in sweep.coords else outcomes(sweep))
    table = pd.DataFrame({name: faulty[name].values for name in by}, index=range(faulty.sizes["trial"]))
    number = table.groupby(list(by), dropna=False, sort=True).ngroup().to_numpy() if by else np.zeros(len(table), int)
    one = pd.DataFrame(index=[0])  # group of all, also of a sweep without faults
    heads = table.iloc[np.unique(number, return_index=True)[1]].reset_index(drop=True) if by else one
    # A word that is none of these has the number -1, and so counts in the last column.
    code = pd.Index([*OUTCOMES, IDLE]).get_indexer(faulty["fault_outcome"].values)
    counts = np.zeros((len(heads), len(OUTCOMES) + 2), dtype=int)
    np.add.at(counts, (number, code), 1)
    count, total = counts[:, :-2].ravel(), np.repeat(counts[:, :-2].sum(axis=1), len(OUTCOMES))
    low, high = wilson_interval(count, total)
    with np.errstate(invalid="ignore"):
        share = count / total
    columns = {"outcome": list(OUTCOMES) * len(heads), "count": count, "trials": total}
    columns |= {name: np.repeat(counts[:, at], len(OUTCOMES)) for name, at in (("idle", -2), ("left_out", -1))}
    columns |= {"share": share, "low": low, "high": high}
    rows = heads.loc[np.repeat(heads.index, len(OUTCOMES))].reset_index(drop=True)
    return rows.assign(**columns)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of `values` [seeds, segments], for other seeds and for other text: (low, high).

    Each value is taken as mean + what its seed adds + what its segment of the held-out text adds + the rest, all three
    drawn at random (a two-way layout, both ways crossed; Searle, Casella, McCulloch 1992, chapter 4). The variance of
    the mean is V = V_seeds + V_segments - V_rest, of the means over segments, those over seeds, and what is in both;
    the interval is Student's t with the degrees of freedom of Satterthwaite (1946, doi 10.2307/3002019). With one
    segment it is the t interval over seeds. NaN for fewer than two seeds, and where a value is NaN or infinite.
    """
    seeds, segments = values.shape
    if seeds < 2 or not segments or not np.isfinite(values).all():
        return np.nan, np.nan
    mean, of_seeds, of_segments = values.mean(), values.mean(axis=1), values.mean(axis=0)
    parts, freedom = [of_seeds.var(ddof=1) / seeds], [seeds - 1]
    if segments > 1:
        rest = ((values - of_seeds[:, None] - of_segments + mean) ** 2).sum() / ((seeds - 1) * (segments - 1))
        parts += [of_segments.var(ddof=1) / segments, rest / (seeds * segments)]
        freedom += [segments - 1, (seeds - 1) * (segments - 1)]
    variance = max(sum(parts[:2]) - sum(parts[2:]), *parts[:2]) if segments > 1 else parts[0]
    if not variance:
        return float(mean), float(mean)
    df = variance**2 / sum(part**2 / degrees for part, degrees in zip(parts, freedom, strict=True))
    reach = stdtrit(max(df, min(freedom)), (1 + CONFIDENCE) / 2) * np.sqrt(variance)
    return float(mean - reach), float(mean + reach)


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Median of `values` [n], and its 95% percentile bootstrap (Efron 1979): (median, low, high).

    A value that was not seen to end is infinite, which counts it as larger than all others; so a median, or an end of
    the interval, that is infinite lies beyond what was watched. NaN for no values; NaN ends for fewer than two.
    """
    if len(values) == 0:
        return np.nan, np.nan, np.nan
    return float(np.median(values)), *bootstrap(values, lambda drawn: np.median(drawn, axis=-1))


def bootstrap(
    values: np.ndarray,
    statistic: Callable[..., np.ndarray],
    *others: np.ndarray,
    interpolated: bool = False,
) -> tuple[float, float]:
    """95% percentile bootstrap (Efron 1979) of `statistic` over the last axis of `values` [..., n]: (low, high).

    `statistic` is given [..., draws, n] and gives [draws]; all rows of `values` are drawn alike, as pairs have to be.
    `others` are further groups, each drawn by itself and handed to it as well. Values may be infinite, unless the ends
    are `interpolated` between draws. NaN for n < 2, and where the statistic is NaN for some draw. With few values it is
    too narrow: up to n = 3 it is about their range, which holds a true mean or median only 1 - 2^(1-n) of the time.
    """
    groups = (values, *others)
    sizes = tuple(group.shape[-1] for group in groups)
    if min(sizes) < 2:
        return np.nan, np.nan
    drawn = [group[..., which] for group, which in zip(groups, draws(sizes), strict=True)]
    statistics = np.sort(statistic(*drawn))
    if np.isnan(statistics[-1]):
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    if interpolated:
        return float(np.quantile(statistics, tail)), float(np.quantile(statistics, 1 - tail))
    # Between a number and infinity nothing can be interpolated: the wider of the two.
    below = tail * (RESAMPLES - 1)
    return float(statistics[math.floor(below)]), float(statistics[math.ceil(RESAMPLES - 1 - below)])


@functools.lru_cache(maxsize=8)
def draws(sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Which values each bootstrap sample consists of: for each group, of n values, [draws, n], read-only."""
    generator = np.random.default_rng(0)
    drawn = [generator.integers(n, size=(RESAMPLES, n)) for n in sizes]
    for which in drawn:
        which.flags.writeable = False
    return drawn
