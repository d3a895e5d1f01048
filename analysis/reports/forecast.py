"""What the command `forecast` says of larger models, in lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.forecast_scores.sealing import (
    AT,
    SEAL,
    Sealed,
    check_enough,
    forecast_all,
    known_of,
    seal,
    sizes_of,
    units_of,
    wanted_units,
    widest,
)
from analysis.forecasts.base import LEVELS, MIDDLE, Known, forecasters, rules
from analysis.measures.forecast_targets import CELL, Observations, observed_runs
from analysis.reading.open_sweep import open_sweep
from analysis.reports.printed import table_lines
from harness.basics.errors import nearest
from harness.basics.printing import count, label
from harness.config import ConfigError

DEFAULT = "hierarchical"
LOW, HIGH = LEVELS.index(0.1), LEVELS.index(0.9)
SHOWN = ("edge", "loss", "sensitivity")
SAID = (
    "In brackets 80% intervals for the mean over many seeds. largest stable rate: bounded by the rates tried. "
    "A forecast goes beyond everything that was trained: train the size, and score it."
)


def told_forecast(out: Path, fit: Sequence[str], predict: Sequence[str], tune: Sequence[str], by: str) -> list[str]:
    """A line for each recipe and size. Raises ConfigError."""
    _check_name(by)
    with told_of(f"out={out}"):
        known, sizes = known_of(open_sweep(out), fit, predict, tune, AT)
    return _forecast_lines(known, wanted_units(known.observations, sizes), by)


def told_from_table(file: Path, predict: Sequence[str], by: str) -> list[str]:
    """The same from a table of runs. Raises ConfigError."""
    _check_name(by)
    try:
        table = pd.read_csv(file)
    except OSError as error:
        raise ConfigError(f"--from {file}: {error.strerror}; allowed: a CSV file") from None
    except (ValueError, pd.errors.ParserError) as error:
        raise ConfigError(f"--from {file}: {_why_no_table(error)}; allowed: a CSV file, a row for each run") from None
    with told_of(f"--from {file}"):
        observations = observed_runs(table)
        check_enough(observations)
        has_widths = "width" in [str(name).strip().lower() for name in table]
        sizes = sizes_of(_of_parameters(predict) if not has_widths else _with_depth(predict, observations))
    known = Known(observations, tuple(widest(observations)))
    return _forecast_lines(known, wanted_units(observations, sizes), by)


def _why_no_table(error: Exception) -> str:
    """What is wrong with a file that pandas cannot read as CSV, in words."""
    if isinstance(error, UnicodeDecodeError):
        return "is no text in UTF-8"
    if isinstance(error, pd.errors.EmptyDataError):
        return "is empty"
    if match := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error)):
        return f"is no table: its first line has {count(int(match[1]), 'column')}, line {match[2]} has {match[3]}"
    return "is no table"


def _of_parameters(predict: Sequence[str]) -> list[str]:
    """`parameters=N` as the width of one block of so many. Raises ConfigError."""
    found = []
    for where in predict:
        key, _, text = where.partition("=")
        if key != "parameters":
            raise ConfigError(f"--predict {where:.60}: the table knows parameters alone; allowed: parameters=N[,N]")
        try:
            found += [f"{(float(word) / 12) ** 0.5!r}" for word in text.split(",")]
        except ValueError:
            raise ConfigError(f"--predict {where:.60}: not numbers; allowed: parameters=N[,N]") from None
    return [f"width={','.join(found)}", "depth=1"]


def _with_depth(predict: Sequence[str], observations: Observations) -> list[str]:
    depths = sorted({depth for _, depth in observations.sizes})
    has_depth = any(where.startswith("depth=") for where in predict)
    return [*predict, *([] if has_depth else [f"depth={','.join(f'{depth:g}' for depth in depths)}"])]


def _check_name(by: str) -> None:
    if by not in forecasters():
        hint = nearest(by, forecasters())
        raise ConfigError(f"--by {label(by)}: unknown; {hint}allowed: {', '.join(forecasters())}")


@contextmanager
def told_of(key: str) -> Iterator[None]:
    """Reasons of errors that name no option are told of this one."""
    try:
        yield
    except ConfigError as error:
        reasons = (r if r.startswith(("--", "out=")) else f"{key}: {r}" for r in error.reasons)
        raise ConfigError(*reasons) from None


def _forecast_lines(known: Known, units: pd.DataFrame, by: str) -> list[str]:
    said, _ = forecast_all(known, units)
    if by not in said:
        raise ConfigError(f"--by {by}: says nothing of what was observed; allowed: {', '.join(said) or 'none'}")
    return [*_forecast_table(Sealed({"units": _rows(units), "forecasts": said}), by), "", SAID]


def _rows(units: pd.DataFrame) -> list[list[object]]:
    return [list(row) for row in units.itertuples(index=False)]


def _forecast_table(sealed: Sealed, by: str) -> list[str]:
    """Of each cell the largest stable rate, the loss at the best rate, and LR sensitivity."""
    units, rows = sealed.units, []
    cells = units_of(units, "edge")
    forecast = {target: sealed.quantiles(by, target) for target in SHOWN}
    for place in cells:
        cell = units.iloc[place]
        row: dict[str, object] = {name: f"{cell[name]:g}" if name != "recipe" else label(cell[name]) for name in CELL}
        for target, values in forecast.items():
            quantiles = None if values is None else values[place]
            row["largest stable rate" if target == "edge" else target] = _told(quantiles, is_log=target == "edge")
        rows.append(row)
    lines = [f"forecaster: {by} ({forecasters()[by].about})", ""]
    if any(values is not None for values in forecast.values()):
        lines += [*table_lines(pd.DataFrame(rows)), ""]
    return [*lines, *_probability_table(sealed, by)]


def _probability_table(sealed: Sealed, by: str) -> list[str]:
    """How likely a run does not train, a row a cell and a column a rate; empty where nothing is said of it."""
    values = sealed.quantiles(by, "divergent")
    if values is None:
        return []
    units = sealed.units.assign(p=values[:, 0])
    units = units.iloc[units_of(sealed.units, "divergent")]
    table = units.pivot_table(index=CELL, columns="lr", values="p", sort=False).reset_index()
    table.columns = [name if isinstance(name, str) else f"{name:g}" for name in table.columns]
    shown = table.assign(recipe=[label(recipe) for recipe in table["recipe"]])
    rates = [name for name in shown if name not in CELL]
    shown = shown.assign(**{name: [f"{p:.2f}" for p in shown[name]] for name in rates})
    return ["Probability that a run does not train, by learning rate:", *table_lines(shown)]


def _told(quantiles: np.ndarray | None, is_log: bool) -> str:
    if quantiles is None or np.isnan(quantiles).any():
        return "-"
    middle, low, high = (10**quantiles if is_log else quantiles)[[MIDDLE, LOW, HIGH]]
    return f"{middle:.3g} [{low:.3g}, {high:.3g}]"


def told_seal(
    out: Path, fit: Sequence[str], predict: Sequence[str], tune: Sequence[str], file: Path, by: str
) -> list[str]:
    """Seal forecasts, and say what they are. Raises ConfigError."""
    _check_name(by)
    with told_of(f"out={out}"):
        sealed = seal(out, open_sweep(out), fit, predict, tune, file)
    lines = _forecast_table(sealed, by) if by in sealed.names else []
    cells = len(units_of(sealed.units, "edge"))
    names = [*sealed.names, *sealed.tree["rules"]]
    silent = [name for name in (*forecasters(), *rules()) if name not in names]
    return [
        *lines,
        "",
        SAID,
        f"{count(cells, 'cell')} forecast by {', '.join(names)}.",
        *([f"Too few sizes, seeds or signals for {', '.join(silent)}."] if silent else []),
        f"Sealed in {file}: {sealed.tree[SEAL]}",
    ]
