"""The heat map of mitigations: what each of them makes better or worse than the recipe without one, and by how much."""

from __future__ import annotations

import textwrap
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.figures.drawing import Drawing, style
from analysis.figures.mitigation_legend import (
    BASELINE_EDGE,
    CELL_EDGE,
    COLOURS,
    MARGIN,
    MISSING,
    TOLD,
    UNTOLD,
    LegendEntry,
    draw_legend,
    entries_of,
    legend_size,
    pale,
    text_width,
)
from analysis.figures.mitigation_words import NOTHING, TIME, coverage, value_words
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.mitigations import UNLIKE_PACKS, Comparison, Metric
from analysis.reading.acted import BASELINE
from analysis.reading.levels import word
from harness.basics.printing import count

TYPICAL = 0.75  # quantile of the changes that has the full colour; a single outlier would leave no colour to the others
RATIOS = (1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 30, 100, 1000, 10_000)
# Inches: a cell, a row, between two metrics, the narrowest metric; heading, places, above the legend; a letter.
CELL, ROW, GAP, NARROWEST = 0.6, 0.235, 0.14, 1.15
HEADING, PLACE, ABOVE, LETTER = 1.2, 0.25, 0.3, 0.075
MOST_PLACES, MOST_NAMES = 6, 150  # columns of a metric, and rows, of a map that can be read and saved
WIDEST, SMALLEST = 2.8, 8.0  # inches: of a name that is not cut short; a figure in which the legend has room


@dataclass(frozen=True)
class Columns:
    """The columns of one metric: where they begin, how wide each is, and the change of full colour, if any changed."""

    name: str
    metric: Metric
    left: float
    cell: float
    full: float | None


@drawn_from(Needs.COMPARISON, place=1, points="kind=map&x=lr&y=mitigation&colour=final_validation_loss")
def mitigation_map(results: Results) -> Drawing:
    """A row a mitigation, the baseline on top; a column a metric and width; the numbers are the values.

    Colour is the change against the baseline in the same column, from worse (red) over none (white) to better (blue).
    The change that has the full colour is written over each metric: three quarters of the changes that the intervals
    tell from none are not larger. A cell is pale and its number grey where no change can be told or there is no
    interval; where one can, the number is bold. What was not measured is a dash on grey. Of more than 6
    columns a metric 6 are drawn, evenly spaced in their order, and of more than 150 mitigations the first.
    """
    comparison = results.comparison
    if comparison.table.empty:
        return Drawing(None, comparison.reason.replace("No comparison", "No figure", 1))
    caption = _caption(comparison)
    comparison, left_out = _thinned(comparison)
    table, places = comparison.table, _places(comparison)
    names = list(table["mitigation"].unique())
    (corner, *labels), widths = zip(*map(_shortened, [", ".join(comparison.axes[1:]), *names]), strict=True)
    left = max(1.0, MARGIN + 0.08 + max(widths))
    columns = _columns(comparison, left, len(places))
    top = HEADING + (PLACE if len(comparison.axes) == 2 else 0.1 + max(map(text_width, places)))
    right = columns[-1].left + columns[-1].cell * len(places) + MARGIN
    entries = _entries(comparison)
    width = max(right, SMALLEST, legend_size(entries, right)[0])
    bottom = top + ROW * len(names) + ABOVE
    height = bottom + legend_size(entries, width)[1]
    with style():
        figure = Figure(figsize=(width, height))
        panel = figure.add_axes((0, 0, 1, 1))
        panel.set(xlim=(0, width), ylim=(height, 0))  # inches from the top left
        panel.set_axis_off()
        panel.text(width / 2, 0.2, "Mitigations against the recipe without one", ha="center", va="center", size=12)
        panel.text(left - 0.08, top - 0.06, corner, ha="right", va="bottom", size=9)
        for number, label in enumerate(labels):
            text = panel.text(left - 0.08, top + ROW * (number + 0.5), label, ha="right", va="center", size=9)
            text.set_fontweight("bold" if label == BASELINE else "normal")
        for column in columns:
            _draw_heading(panel, column, places, top)
            _draw_cells(panel, comparison, column, top)
        draw_legend(figure, panel, entries, bottom)
    return Drawing(figure, caption + left_out)


def _shortened(name: str) -> tuple[str, float]:
    """As much of a name as has room, and how many inches that takes."""
    label, width = name, text_width(name)
    if width > WIDEST:
        letters = bisect_left(range(len(name)), True, key=lambda letters: text_width(f"{name[:letters]}…") > WIDEST) - 1
        label = f"{name[:letters]}…"
        width = text_width(label)
    return label, width


def _thinned(comparison: Comparison) -> tuple[Comparison, str]:
    """What has room in a map, and a note for the caption on what that leaves out."""
    table, left_out = comparison.table, []
    names, number = table["mitigation"].unique(), comparison.place
    total = int(number.max()) + 1
    if total > MOST_PLACES:
        table = table[number.isin(np.linspace(0, total - 1, MOST_PLACES).round())]
        left_out.append(f"{MOST_PLACES} of {total} combinations of {', '.join(comparison.axes[1:])}, evenly spaced")
    if len(names) > MOST_NAMES:
        table = table[table["mitigation"].isin(names[:MOST_NAMES])]
        left_out.append(f"the first {MOST_NAMES} of {len(names)} rows")
    note = f" Drawn are {' and '.join(left_out)}; the table has all." if left_out else ""
    return replace(comparison, table=table.reset_index(drop=True)), note


def _places(comparison: Comparison) -> list[str]:
    """What names the columns of a metric, in their order: the width, and what else the sweep varies."""
    axes = comparison.axes[1:]
    heads = comparison.table[axes].drop_duplicates().sort_values(axes)
    return [", ".join(map(word, values)) for values in heads.itertuples(index=False)]


def _columns(comparison: Comparison, left: float, places: int) -> list[Columns]:
    columns = []
    for name, metric in _drawn(comparison).items():
        cell = max(CELL, NARROWEST / places)
        columns.append(Columns(name, metric, left, cell, full_colour(comparison, name)))
        left += places * cell + GAP
    return columns


def _drawn(comparison: Comparison) -> dict[str, Metric]:
    """The metrics that have columns; times only where some can be told, for the rest may be the machine's noise."""
    return {
        name: metric
        for name, metric in comparison.metrics.items()
        if metric.is_in_map and (name != TIME or comparison.is_told(name).any())
    }


def _words(comparison: Comparison, row: pd.Series, name: str) -> str:
    """What a cell says; of a time that cannot be told from the baseline's, nothing."""
    is_noise = name == TIME and row["mitigation"] != BASELINE and not comparison.is_told(name)[row.name]
    return NOTHING if is_noise else value_words(row, name)


def full_colour(comparison: Comparison, name: str) -> float | None:
    """The change of a metric that has the full colour: a difference of 1, 2 or 5 times a power of ten, or a ratio."""
    gain = comparison.gain(name).abs()
    is_known = np.isfinite(gain) & (gain > 0)
    is_told = is_known & comparison.is_told(name)
    sizes = gain[is_told if is_told.any() else is_known]
    if sizes.empty:
        return None
    typical = float(sizes.quantile(TYPICAL)) * (1 - 1e-9)
    if comparison.metrics[name].is_ratio:
        return next((ratio for ratio in RATIOS if np.log(ratio) >= typical), RATIOS[-1])
    power = 10.0 ** np.floor(np.log10(typical))
    return float(f"{next(step * power for step in (1, 2, 5, 10) if step * power >= typical):g}")


def _draw_heading(panel: Axes, column: Columns, places: list[str], top: float) -> None:
    width = column.cell * len(places)
    middle = column.left + width / 2
    lines = textwrap.wrap(column.metric.label, int(width / LETTER))
    lines += [f"[{column.metric.units}]"] if column.metric.units else []
    look: dict[str, Any] = {"ha": "center", "va": "bottom"}
    panel.text(middle, HEADING - 0.23, "\n".join(lines), size=9, weight="bold", linespacing=1.15, **look)
    if column.full is not None:
        full = f"x or / {column.full:g}" if column.metric.is_ratio else f"± {column.full:g}"
        panel.text(middle, HEADING - 0.05, f"full at {full}", size=8, color="0.35", **look)
    for number, place in enumerate(places):
        x = column.left + column.cell * (number + 0.5)
        panel.text(x, top - 0.06, place, rotation=90 if "," in place else 0, size=9, **look)


def _draw_cells(panel: Axes, comparison: Comparison, column: Columns, top: float) -> None:
    table = comparison.table
    told, gain = comparison.is_told(column.name), comparison.gain(column.name)
    place = comparison.place
    line = table["mitigation"].map({name: number for number, name in enumerate(table["mitigation"].unique())})
    for index, row in table.iterrows():
        x, y = column.left + column.cell * place[index], top + ROW * line[index]
        value, is_baseline = _words(comparison, row, column.name), row["mitigation"] == BASELINE
        colour = _colour(gain[index], column, told[index])
        look: dict[str, Any] = {"facecolor": colour, **(BASELINE_EDGE if is_baseline else CELL_EDGE)}
        look = MISSING if value == NOTHING else look
        panel.add_patch(Rectangle((x, y), column.cell, ROW, clip_on=False, **look))
        is_dark = value != NOTHING and np.dot(colour, (0.299, 0.587, 0.114)) < 0.5
        weight = "bold" if told[index] or is_baseline else "normal"
        middle = x + column.cell / 2, y + ROW / 2
        text = panel.text(*middle, value, ha="center", va="center", size=8, zorder=3, weight=weight)
        text.set_color("white" if is_dark else TOLD if told[index] or is_baseline else UNTOLD)


def _colour(gain: float, column: Columns, is_told: bool) -> np.ndarray:
    """RGB of a change; white where there is none. An infinite one, to or from a lost run, has the full colour."""
    if np.isnan(gain) or gain == 0 or (column.full is None and np.isfinite(gain)):
        return np.ones(3)
    full = 1.0 if column.full is None else np.log(column.full) if column.metric.is_ratio else column.full
    colour = np.array(COLOURS(0.5 + 0.5 * float(np.clip(gain / full, -1, 1))))[:3]
    return colour if is_told else pale(colour)


def _entries(comparison: Comparison) -> list[LegendEntry]:
    """Of the legend, for what the cells look like."""
    metrics = _drawn(comparison)
    cells = {_words(comparison, row, name) for _, row in comparison.table.iterrows() for name in metrics}
    return entries_of(cells, any(comparison.is_told(name).any() for name in metrics))


def _caption(comparison: Comparison) -> str:
    others = count(comparison.table["mitigation"].nunique() - 1, "mitigation")
    sentences = [
        f"{others} and the baseline, which is the recipe without one, on the same seeds, rates and faults. Numbers are "
        "the values, colours the change against the baseline in the same column: blue is better, red worse, and full "
        "where the change is as large as written over the column.",
        coverage(comparison),
    ]
    notes = {
        "stable_rate": "Largest stable rate: the mean over seeds of the largest rate at which each was stable, which "
        "may be above the largest at which every seed was; ≥ where some seed is stable at every swept rate, < where "
        "none is at any, ≈ where some are at none.",
        "deviation": "∞: became non-finite.",
        "recovery": ">: not recovered by the end of the run.",
        "step_time": "Step time: ≈ where other mitigations train in the same packs and share their time. "
        f"Less than x or / {UNLIKE_PACKS:g}, and what one pack took, is not told: packs of unlike sizes may differ by "
        "so much, and the machine may have been busy with something else.",
    }
    return " ".join([*sentences, *(text for name, text in notes.items() if name in _drawn(comparison))])
