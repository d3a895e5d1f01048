"""The series of a figure: one line for each mitigation, and for whatever else the sweep varies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.reading.acted import BASELINE
from analysis.reading.levels import word

SPREAD = 0.3  # of the distance between two widths, over which the points of several series stand
MOST_SERIES = 10  # lines of a panel that can be told apart
LETTER = 0.085  # inches: of a legend's letter at most, on average


def series_of(table: pd.DataFrame, axes: Sequence[str]) -> pd.Series:
    """What one line of a plot stands for: the mitigation, and whatever else differs between these rows."""
    axes = [axes[0], *(axis for axis in axes[1:] if table[axis].nunique(dropna=False) > 1)]
    parts = [table[axes[0]].astype(str)] + [f"{axis} = " + table[axis].map(word).astype(str) for axis in axes[1:]]
    return pd.Series([", ".join(names) for names in zip(*parts, strict=True)], index=table.index, dtype=object)


def with_short_names(table: pd.DataFrame, axes: Sequence[str], series: Sequence[str]) -> tuple[pd.DataFrame, list[str]]:
    """The rows of these series, and their names in the same order, by what differs between them alone."""
    shown = table[table["series"].isin(series)]
    named = series_of(shown, axes)
    names = dict(zip(shown["series"], named, strict=True))
    return shown.assign(series=named), [names[name] for name in series]


def is_plain(name: str) -> bool:
    """Whether a series is without a mitigation."""
    return name.split(",")[0] == BASELINE


def in_order(series: Sequence[str]) -> list[str]:
    """Alphabetical, but the recipe without a mitigation first."""
    return sorted(set(series), key=lambda name: (not is_plain(name), name))


def chosen(scores: pd.Series, most: int, with_what: str = "higher values") -> tuple[list[str], str]:
    """The series to show of those in `scores`, in order: those without a mitigation, and of the others the lowest.

    Where a sweep has further axes, many are without a mitigation: then the lowest of them, in half of the places. With
    what the caption says on how many that leaves out, if it does: those `with_what`.
    """
    series = in_order(scores.index)
    if len(series) <= most:
        return series, ""
    lowest = scores.sort_values(kind="stable").index
    is_first = np.array([is_plain(name) for name in lowest])
    plain, others = lowest[is_first], lowest[~is_first]
    kept = plain[: max(most // 2, most - len(others))]
    kind = "mitigations" if len(kept) == len(plain) else "combinations"
    left_out = f" Not shown: {len(series) - most} {kind} with {with_what}."
    return in_order([*kept, *others[: most - len(kept)]]), left_out


def middle_width(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the middle width, of two the lower; all where none has a width, as runs of one's own."""
    widths = sorted(table["width"].dropna().unique())
    return table if not widths else table[table["width"] == widths[(len(widths) - 1) // 2]]


def with_widths(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows that have a width, and what the caption says on how many have none, as attached runs."""
    has_width = table["width"].notna()
    number = int((~has_width).sum())
    return table[has_width], f" Not shown: {number} without a width." if number else ""


def nested(position: int, count: int) -> float:
    """How large a line or a marker of a series is, against the usual one: those that coincide are all seen."""
    return 1.8 - 0.8 * position / max(1, count - 1)


def beside(values: pd.Series, widths: Sequence[float], position: int, count: int) -> np.ndarray:
    """Places on an axis that has the `widths` side by side, a little aside for each of `count` series."""
    places: np.ndarray = pd.Index(widths).get_indexer(values)
    return places + SPREAD * ((position + 0.5) / count - 0.5)


def mark_widths(panel: Axes, widths: Sequence[float]) -> None:
    """Ticks at the models' widths, which stand side by side."""
    panel.set_xticks(range(len(widths)), [f"{width:g}" for width in widths])
    panel.set_xlim(-0.5, len(widths) - 0.5)
