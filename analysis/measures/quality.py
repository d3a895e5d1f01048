"""The quality of what policies sample: how it went, and where it ended, by whatever a sweep varied."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import coordinates
from analysis.measures.statistics import mean_interval
from analysis.measures.tidy import axes_of
from analysis.reading.finals import final_loss
from analysis.reading.groups import is_seed
from analysis.reading.levels import word

QUALITY = "quality"


def policies(sweep: xr.Dataset) -> xr.Dataset:
    """The trials of a sweep that are policies, which have a quality at some step."""
    if QUALITY not in sweep:
        return sweep.isel(trial=slice(0, 0))
    return sweep.isel(trial=np.flatnonzero(np.isfinite(sweep[QUALITY].values).any(axis=1)))


def without_policies(sweep: xr.Dataset) -> xr.Dataset:
    """The other trials of a sweep."""
    return sweep.isel(trial=np.flatnonzero(~np.isin(sweep["trial"].values, policies(sweep)["trial"].values)))


def are_policies(sweep: xr.Dataset) -> bool:
    """Whether there are trials, and all of them are policies."""
    return 0 < sweep.sizes["trial"] == policies(sweep).sizes["trial"]


def varied(sweep: xr.Dataset) -> list[str]:
    """The fields in which trials differ, apart from seeds."""
    return [axis for axis in axes_of(sweep) if not is_seed(sweep[axis].attrs["path"])]


def by_varied(sweep: xr.Dataset) -> Iterator[tuple[str, dict[str, object], xr.Dataset]]:
    """The policies by what was varied: in words, as levels by field, and their trials, which differ by seeds alone."""
    chosen = policies(sweep)
    axes = varied(chosen)
    table = coordinates(chosen)
    number = table.groupby(axes, sort=True, dropna=False).ngroup().to_numpy() if axes else np.zeros(len(table), int)
    for group in np.unique(number):
        rows = np.flatnonzero(number == group)
        levels = {axis: table[axis].iloc[rows[0]] for axis in axes}
        words = ", ".join(f"{axis} {word(level)}" for axis, level in levels.items()) or "all trials"
        yield words, levels, chosen.isel(trial=rows)


def final_quality(sweep: xr.Dataset) -> pd.DataFrame:
    """Mean quality over the last 5% of the steps of finished policies, a row for what was varied.

    Columns: `under` (in words), `quality` (the mean over the trials that ended with one), `low` and `high` (its 95%
    interval over seeds, Student's t; NaN for one), `trials` (how many these are), and `lost` (how many finished
    without one, since they became non-finite).
    """
    rows = []
    for words, _, trials in by_varied(sweep):
        ended = -final_loss(trials).values[trials["complete"].values]
        known = ended[np.isfinite(ended)]
        low, high = mean_interval(known[:, None])
        mean = float(known.mean()) if len(known) else np.nan
        rows.append([words, mean, low, high, len(known), len(ended) - len(known)])
    return pd.DataFrame(rows, columns=["under", "quality", "low", "high", "trials", "lost"])
