"""A sweep as one plain table, and as a grid of its axes with means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.metrics import segment_losses, trial_table
from analysis.measures.statistics import mean_interval
from analysis.reading.groups import is_seed, splitting
from analysis.reading.levels import in_order, varies
from analysis.reading.open_sweep import ALWAYS
from harness.config import ConfigError

ENDS = ("outcome", "nonfinite_step", "final_loss", "final_validation_loss", "final_validation_loss_error")
LOSS = "final_validation_loss"


def axes_of(sweep: xr.Dataset) -> list[str]:
    """The fields of the configuration that tell trials apart, under their short names; seeds last.

    A field that follows from those before it, as what a mitigation sets, is not among them.
    """
    paths = {
        str(name): x.attrs["path"] for name, x in sweep.coords.items() if x.dims == ("trial",) and "path" in x.attrs
    }
    order = sorted(paths, key=lambda name: (is_seed(paths[name]), paths[name] not in ALWAYS))
    varied = {name: sweep[name].values for name in order if varies(sweep[name].values)}
    return splitting(np.zeros(sweep.sizes["trial"], int), varied)[0] if sweep.sizes["trial"] else []


def table(sweep: xr.Dataset) -> pd.DataFrame:
    """One row a trial: what was varied, what became of it, and where it ended.

    Args:
        sweep: As `analysis.open_sweep` gives it, or some of its trials.

    Returns:
        Index `trial`. Columns: the fields that tell these trials apart, then `outcome`, `nonfinite_step`, `final_loss`,
        `final_validation_loss` and its standard error (nat/token), and `golden` where there are faults.
    """
    paired = ["golden"] if (sweep["golden"] != sweep["trial"]).any() else []
    columns = {name: sweep[name].values for name in [*axes_of(sweep), *ENDS, *paired]}
    return pd.DataFrame(columns, index=pd.Index(sweep["trial"].values, name="trial"))


def grid(sweep: xr.Dataset, axes: Sequence[str], variable: str = LOSS) -> xr.Dataset:
    """Means over seeds, with intervals, for each combination of the levels of some axes.

    Args:
        sweep: As `analysis.open_sweep` gives it, or some of its trials.
        axes: Names of coordinates along `trial`. A level that is null stays one.
        variable: Of one number a trial, such as `final_loss` or `nonfinite_step`.

    Returns:
        Dims are the axes. `mean`, `low` and `high` (95%: for other seeds, and, of `final_validation_loss`, for
        other held-out text; NaN for one seed), and `count`, the number of trials. A trial whose value is not
        finite makes the mean of its cell NaN; `count` is 0 where there is no trial.

    Raises:
        ConfigError: An unknown name, or trials of a cell that differ in more than their seeds. It is a ValueError.
    """
    values = _numbers(sweep, variable)
    levels = {axis: in_order(_coordinate(sweep, axis)) for axis in axes}
    if not axes:
        raise ConfigError(f"axes={list(axes)}: none is named; allowed: some of {', '.join(axes_of(sweep))}")
    keys = [_numbered(sweep[axis].values, levels[axis]) for axis in axes]
    shape = tuple(map(len, levels.values()))
    cells = np.ravel_multi_index(keys, shape) if sweep.sizes["trial"] else np.zeros(0, int)
    _check_cells(sweep, axes, cells)
    found = {name: np.full(shape, np.nan) for name in ("mean", "low", "high")} | {"count": np.zeros(shape, int)}
    for cell in np.unique(cells):
        place, here = np.unravel_index(cell, shape), values[cells == cell]
        found["mean"][place], found["count"][place] = here.mean(), len(here)
        found["low"][place], found["high"][place] = mean_interval(here)
    about = {key: sweep[variable].attrs[key] for key in ("units", "long_name") if key in sweep[variable].attrs}
    arrays = {name: (tuple(axes), array, about if name != "count" else {}) for name, array in found.items()}
    names = {axis: (axis, _levels(values), sweep[axis].attrs) for axis, values in levels.items()}
    return xr.Dataset(arrays, names)


def _numbers(sweep: xr.Dataset, variable: str) -> np.ndarray:
    """The values of a variable, [trial, parts]: of the final loss on held-out text those of its segments."""
    known = [str(name) for name, x in sweep.variables.items() if x.dims == ("trial",) and x.dtype.kind in "iuf"]
    if variable not in known:
        raise ConfigError(f"variable={variable}: no number of a trial; allowed: {', '.join(known)}")
    if variable == LOSS:
        return final_losses(sweep)
    values: np.ndarray = sweep[variable].values.astype(float)[:, None]
    return values


def final_losses(sweep: xr.Dataset) -> np.ndarray:
    """Final validation losses by segment of the held-out text, [trial, segment]; NaN for a run that was lost."""
    losses = segment_losses(sweep, trial_table(sweep))
    return np.where(np.isfinite(losses), losses, np.nan)


def _coordinate(sweep: xr.Dataset, axis: str) -> np.ndarray:
    known = [str(name) for name, x in sweep.coords.items() if x.dims == ("trial",)]
    if axis not in known:
        raise ConfigError(f"axis {axis}: unknown; allowed: {', '.join(known)}")
    values: np.ndarray = sweep[axis].values
    return values


def _numbered(values: np.ndarray, levels: Sequence[Any]) -> np.ndarray:
    """Which level each trial has, [trial]."""
    codes, different = pd.factorize(np.asarray(values), sort=True, use_na_sentinel=False)
    assert len(different) == len(levels)
    numbered: np.ndarray = codes
    return numbered


def _levels(values: Sequence[Any]) -> np.ndarray:
    """Of one type where they can be."""
    if all(isinstance(value, int | float | np.number) for value in values):
        return np.array(values)
    levels = np.empty(len(values), dtype=object)
    levels[:] = values
    return levels if any(not isinstance(value, str) for value in values) else levels.astype(str)


def _check_cells(sweep: xr.Dataset, axes: Sequence[str], cells: np.ndarray) -> None:
    """Raise ConfigError where the trials of a cell differ in a field that is neither an axis nor a seed."""
    for name in axes_of(sweep):
        if name in axes or is_seed(sweep[name].attrs["path"]):
            continue
        codes = pd.factorize(sweep[name].values, use_na_sentinel=False)[0]
        if len(set(zip(cells.tolist(), codes.tolist(), strict=True))) > len(set(cells.tolist())):
            some = ", ".join(str(level) for level in in_order(sweep[name].values)[:4])
            reason = f"trials of one cell differ in {name} ({some})"
            raise ConfigError(f"axes={','.join(axes)}: {reason}; allowed: {name} among them, or trials of one {name}")
