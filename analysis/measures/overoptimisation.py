"""Gold and learned reward of policies against their distance from the start, and the law of Gao et al. for it.

Gao et al. 2022 (arXiv 2210.10760, section 3.1): with d = sqrt(KL(policy, start)), gold reward under reinforcement
learning gains R(d) = d (alpha - beta log d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import clean_trials, coordinates, swept_axes
from analysis.measures.statistics import mean_interval
from analysis.reading.levels import in_order, word
from harness.basics.printing import label

READ = ("quality", "reference_kl")
PROXY = "proxy"
BINS = 16  # of the distance, of equal width


@dataclass(frozen=True)
class Law:
    """alpha and beta, per sqrt(nat), each with its mean over runs and 95% t interval; R^2 of all rollouts."""

    alpha: tuple[float, float, float]
    beta: tuple[float, float, float]
    r_squared: float

    def at(self, distance: np.ndarray) -> np.ndarray:
        """R(d)."""
        return np.asarray(basis(distance) @ np.array([self.alpha[0], self.beta[0]]))


@dataclass(frozen=True)
class DistanceCurve:
    """Of the runs that differ in nothing but seeds: gains over the first rollout by distance, [bins, 3] each.

    Columns are the mean over runs and its 95% t interval; bins that fewer than half of the runs have come through are
    left out. `law` is None where runs are fewer than two, or have not moved.
    """

    name: str
    runs: int
    distance: np.ndarray  # [bins], sqrt(nat)
    gold: np.ndarray
    proxy: np.ndarray | None
    law: Law | None


def distance_curves(sweep: xr.Dataset) -> list[DistanceCurve]:
    """A curve for each arm of the finished policies without a fault, in the order of its fields' values."""
    if not set(READ) <= set(sweep.data_vars):
        return []
    clean = clean_trials(sweep)
    table = coordinates(clean)
    axes = [axis for axis in swept_axes(clean, table, ("mitigation",)) if table[axis].nunique(dropna=False) > 1]
    read = clean[[name for name in (*READ, PROXY) if name in clean.data_vars]].transpose("trial", "step")
    is_there = table["complete"].to_numpy() & np.isfinite(read["quality"].values).any(axis=1)
    names = [", ".join(f"{label(axis)} = {word(row[axis])}" for axis in axes) for _, row in table.iterrows()]
    places = np.array([pd.Index(in_order(table[axis])).get_indexer(table[axis]) for axis in axes])
    rows_in_order = np.lexsort(places[::-1]) if axes else range(len(table))
    found = []
    for name in dict.fromkeys(names[row] for row in rows_in_order if is_there[row]):
        rows = [row for row, one in enumerate(names) if one == name and is_there[row]]
        found.append(_curve(name or "all", read.isel(trial=rows)))
    return found


def basis(distance: np.ndarray) -> np.ndarray:
    """What alpha and beta are the factors of, [n, 2]: d and -d log d, whose limit at 0 is 0."""
    logarithm = np.log(np.where(distance > 0, distance, 1.0))
    return np.stack([distance, -distance * logarithm], axis=1)


def _curve(name: str, read: xr.Dataset) -> DistanceCurve:
    distance = np.sqrt(np.clip(read["reference_kl"].values, 0.0, None))
    gold = _gains(read["quality"].values)
    proxy = _gains(read[PROXY].values) if PROXY in read and np.isfinite(read[PROXY].values).any() else None
    edges = np.linspace(0.0, max(np.nanmax(distance), 1e-9), BINS + 1)
    places = np.where(np.isfinite(distance), np.clip(np.digitize(distance, edges) - 1, 0, BINS - 1), -1)
    middle = (edges[1:] + edges[:-1]) / 2
    of_bins = _in_bins(gold, places)
    is_shown = np.isfinite(of_bins[:, 0])
    learned = None if proxy is None else _in_bins(proxy, places)[is_shown]
    return DistanceCurve(name, len(gold), middle[is_shown], of_bins[is_shown], learned, _law(distance, gold))


def _gains(values: np.ndarray) -> np.ndarray:
    """Less the first one that is known of each run, [run, step]."""
    first = np.isfinite(values).argmax(axis=1)
    return np.asarray(values - values[np.arange(len(values)), first][:, None])


def _in_bins(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The mean over runs of their means in each bin, with its t interval, [bins, 3]."""
    found = np.full((BINS, 3), np.nan)
    for number in range(BINS):
        own = [run[place == number] for run, place in zip(values, places, strict=True)]
        means = np.array([run[np.isfinite(run)].mean() for run in own if np.isfinite(run).any()])
        if len(means) and 2 * len(means) >= len(values):
            found[number] = means.mean(), *mean_interval(means[:, None])
    return found


def _law(distance: np.ndarray, gold: np.ndarray) -> Law | None:
    """Least squares in each run; then the mean over runs."""
    fits = []
    for d, gain in zip(distance, gold, strict=True):
        is_known = np.isfinite(d) & np.isfinite(gain)
        factors, _, rank, _ = np.linalg.lstsq(basis(d[is_known]), gain[is_known], rcond=None)
        if rank == 2:
            fits.append(factors)
    if len(fits) < 2:
        return None
    numbers = [(float(x.mean()), *mean_interval(x[:, None])) for x in np.array(fits).T]
    is_known = np.isfinite(distance) & np.isfinite(gold)
    d, gain = distance[is_known], gold[is_known]
    law = Law(numbers[0], numbers[1], np.nan)
    spread = ((gain - gain.mean()) ** 2).sum()
    r_squared = 1 - ((gain - law.at(d)) ** 2).sum() / spread if spread else np.nan
    return Law(law.alpha, law.beta, float(r_squared))
