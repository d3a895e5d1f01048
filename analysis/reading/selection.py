"""Which trials a command is about: `--where KEY=VALUE`, by the coordinates of `open_sweep`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import xarray as xr

from analysis.reading.levels import NULL, in_order, is_level, numbers
from harness.basics.errors import nearest
from harness.basics.printing import label, printable
from harness.config import ConfigError

MOST_SHOWN = 20  # values in an error
YARDSTICK = "last_bit"  # the fault of trials that say how far golden runs drift apart
WHERE = "trials of which it holds, by a coordinate of the dataset; may be given several times"


def add_where(parser: argparse.ArgumentParser) -> None:
    """The option of every command that takes some of the trials."""
    parser.add_argument("--where", metavar="KEY=VALUE[,VALUE]", action="append", default=[], help=WHERE)


def with_company(sweep: xr.Dataset, wheres: Sequence[str]) -> xr.Dataset:
    """`selected`, and what those trials are judged by: their golden twins, and the `last_bit` trials of these."""
    if not wheres:
        return sweep
    chosen = selected(sweep, wheres)["trial"].values
    names, golden = sweep["trial"].values, sweep["golden"].values
    kept = np.isin(names, chosen)
    kept |= np.isin(names, golden[kept])
    kept |= (sweep["fault"].values == YARDSTICK) & np.isin(golden, names[kept])
    return sweep.isel(trial=np.flatnonzero(kept))


def selected(sweep: xr.Dataset, wheres: Sequence[str]) -> xr.Dataset:
    """The trials of which every `KEY=VALUE` holds; several values, with commas between, are any of them.

    Raises ConfigError for an unknown key, a value that no trial has, and where no trial is left.
    """
    keep = np.ones(sweep.sizes["trial"], bool)
    for where in wheres:
        keep &= _holds(sweep, where)
    if wheres and not keep.any():
        raise ConfigError(f"--where {' '.join(map(label, wheres))}: no trial is all of that; allowed: fewer conditions")
    return sweep.isel(trial=np.flatnonzero(keep)) if wheres else sweep


def chosen_signals(sweep: xr.Dataset, names: str | None) -> list[str]:
    """The variables along `step` of these names, with commas between; all if None. Raises ConfigError."""
    known = [str(name) for name, variable in sweep.data_vars.items() if "step" in variable.dims]
    wanted = known if names is None else list(dict.fromkeys(names.split(",")))
    if unknown := [name for name in wanted if name not in known]:
        allowed = f"{nearest(unknown[0], known)}allowed: {', '.join(map(label, known))}"
        raise ConfigError(f"--signals {label(unknown[0])}: unknown; {allowed}")
    return wanted


def _holds(sweep: xr.Dataset, where: str) -> np.ndarray:
    """Of which trials it holds, [trial]."""
    key, has_value, value = where.partition("=")
    known = [str(name) for name, variable in sweep.coords.items() if variable.dims == ("trial",)]
    if not has_value or key not in known:
        reason = f"unknown key; {nearest(key, known)}" if has_value else "is not KEY=VALUE; "
        raise ConfigError(f"--where {label(where)}: {reason}allowed keys: {', '.join(map(label, known))}")
    column = sweep[key].values
    if (whole := _equal(column, value)).any():
        return whole
    holds = np.zeros(len(column), bool)
    for part in value.split(","):
        if not (found := _equal(column, part)).any():
            raise ConfigError(f"--where {key}={label(part)}: no trial has it; allowed: {_values(column)}")
        holds |= found
    return holds


def _equal(column: np.ndarray, value: str) -> np.ndarray:
    """Where a coordinate has that value, [trial]; a name may also be given as it is printed."""
    if column.dtype.kind == "b":
        return np.array([str(item).lower() == value.lower() for item in column], bool)
    if column.dtype.kind in "iuf":
        try:
            number = float(value)
        except ValueError:
            return np.zeros(len(column), bool)
        is_equal: np.ndarray = np.isnan(column) if np.isnan(number) else column == number
        return is_equal
    if column.dtype.kind == "O":
        found = is_level(column, NULL) if value in (NULL, "null") else _equal(numbers(column), value)
        return found & is_level(column, np.nan) if value == "nan" else found
    is_null = (column == NULL) & (value == "null")  # as it stands on a command line of a sweep
    is_named: np.ndarray = is_null | np.array([value in (item, printable(item)) for item in column.tolist()], bool)
    return is_named


def _values(column: np.ndarray) -> str:
    """What there is, in words."""
    values = [label("nan" if value != value else str(value)) or '""' for value in in_order(column)]
    more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
    return ", ".join(values[:MOST_SHOWN]) + more if values else "nothing, because there are no trials yet"
