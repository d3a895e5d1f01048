"""Effects with their intervals, a line each: of two folders compared, and of claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import seaborn as sns

from analysis.figures.drawing import Drawing, page
from harness.basics.printing import label


@dataclass(frozen=True)
class EffectRow:
    """One effect: what it is of, its mean, and both ends of its interval."""

    name: str
    mean: float
    low: float
    high: float


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
    blue, orange = sns.color_palette("colorblind")[:2]
    with page(7.5, 1.6 + 0.28 * len(rows), title) as figure:
        panel = figure.subplots()
        ends = [
            end for row in rows for end in (row.low, row.high, *marks) if np.isfinite(end) and (end > 0 or not is_log)
        ]
        for place, row in enumerate(rows):
            colour = blue if row.high < min(marks) else orange if row.low > max(marks) else "0.45"
            low, high = max(row.low, min(ends, default=0.0)), min(row.high, max(ends, default=0.0))
            panel.plot([low, high], [place, place], color=colour, linewidth=2)
            for end, shown, marker in ((row.low, low, "<"), (row.high, high, ">")):
                if end != shown:  # it goes on for ever
                    panel.plot(shown, place, marker=marker, color=colour, markersize=7)
            panel.plot(row.mean, place, marker="o", color=colour, markersize=7)
        for mark in marks:
            panel.axvline(mark, color="0.3", linewidth=1)
        panel.set_yticks(range(len(rows)), [label(row.name) for row in rows])
        panel.set_ylim(len(rows) - 0.5, -0.5)
        if is_log:
            panel.set_xscale("log")
        panel.set(xlabel=xlabel)
    return Drawing(figure, caption)
