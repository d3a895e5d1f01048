"""Effects with their intervals, a line each: of two folders compared, and of claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import seaborn as sns
from matplotlib.axes import Axes

from analysis.figures.drawing import Drawing, page
from harness.basics.printing import label


@dataclass(frozen=True)
class EffectRow:
    """One effect: what it is of, its mean, and both ends of its interval."""

    name: str
    mean: float
    low: float
    high: float


MarkedRow = tuple[EffectRow, tuple[float, ...]]


def effects(
    rows: Sequence[EffectRow],
    xlabel: str,
    title: str,
    caption: str,
    marks: Sequence[float] = (0.0,),
    is_log: bool = False,
) -> Drawing:
    """A line for each; blue where all of it lies below every mark, orange where above, grey otherwise.

    An end that is infinite is an arrow at the farthest one that is not.
    """
    with page(7.5, 1.6 + 0.28 * len(rows), title) as figure:
        panel = figure.subplots()
        _draw(panel, [(row, tuple(marks)) for row in rows], is_log)
        for mark in marks:
            panel.axvline(mark, color="0.3", linewidth=1)
        panel.set(xlabel=xlabel)
    return Drawing(figure, caption)


def panels(
    parts: Mapping[str, Sequence[MarkedRow]], title: str, caption: str = "", logarithmic: Sequence[str] = ()
) -> Drawing:
    """Effects of several units, a panel each, with each row's own marks."""
    if not parts:
        return Drawing(None, "nothing was measured")
    sizes = [len(rows) for rows in parts.values()]
    with page(9, 1.2 + 0.9 * len(sizes) + 0.24 * sum(sizes), title) as figure:
        drawn = figure.subplots(len(parts), squeeze=False, gridspec_kw={"height_ratios": [size + 1 for size in sizes]})
        for panel, (unit, rows) in zip(drawn[:, 0], parts.items(), strict=True):
            _draw(panel, rows, unit in logarithmic)
            for place, (_, marks) in enumerate(rows):
                panel.vlines(marks, place - 0.4, place + 0.4, color="0.2", linewidth=1.5)
            panel.set(xlabel=unit)
    return Drawing(figure, caption)


def _draw(panel: Axes, rows: Sequence[MarkedRow], is_log: bool) -> None:
    """A line for each, from the top down."""
    blue, orange = sns.color_palette("colorblind")[:2]
    numbers = [end for row, marks in rows for end in (row.low, row.high, *marks)]
    ends = [end for end in numbers if np.isfinite(end) and (end > 0 or not is_log)]
    for place, (row, marks) in enumerate(rows):
        colour = blue if row.high < min(marks) else orange if row.low > max(marks) else "0.45"
        low, high = max(row.low, min(ends, default=0.0)), min(row.high, max(ends, default=0.0))
        panel.plot([low, high], [place, place], color=colour, linewidth=2)
        for end, shown, marker in ((row.low, low, "<"), (row.high, high, ">")):
            if end != shown:  # it goes on for ever
                panel.plot(shown, place, marker=marker, color=colour, markersize=7)
        panel.plot(row.mean, place, marker="o", color=colour, markersize=7)
    panel.set_yticks(range(len(rows)), [label(row.name) for row, _ in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    if is_log:
        panel.set_xscale("log")
