"""The final loss against the learning rate. Like every figure it leaves pyplot and the global settings as they were."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.drawing import MARKERS, Drawing, palette, style
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import LETTER, MOST_LETTERS, MOST_SERIES, chosen, dodged, series_of
from analysis.measures import metrics
from analysis.reading.acted import BASELINE
from harness.basics.printing import count

LINE = 0.21  # inches: of a legend's line


@drawn_from(Needs.SWEEP, place=1)
def loss_against_rate(results: Results) -> Drawing:
    """Final validation loss of the clean trials against the learning rate: a panel a width, a line a mitigation.

    What is drawn is min(final loss, loss at initialisation), the quantity that LR sensitivity averages; trials that
    became non-finite are crosses at the loss at initialisation. Points are seeds. The loss at initialisation, that of
    the baseline where every width has one, is marked if any trial comes near it, for it would squeeze all others into
    the bottom.
    """
    table = metrics.clean_table(results.sweep)
    axes = metrics.swept_axes(table, ("width", "mitigation"))
    table = table[table["complete"] & (table["lr"] > 0)].assign(series=lambda t: series_of(t, axes[1:]))
    if table["lr"].nunique() < 2:
        return Drawing(None, f"No figure: {count(table['lr'].nunique(), 'learning rate')} among the finished trials.")
    series, left_out = chosen(table.groupby("series")["capped_loss"].mean(), MOST_SERIES)
    table = table[table["series"].isin(series)]
    widths = sorted(table["width"].unique())
    columns = len(widths) if len(widths) <= 3 else math.ceil(math.sqrt(len(widths)))
    rows = math.ceil(len(widths) / columns)
    lost = int(table["nonfinite_step"].notna().sum())
    start, whose = _start(table)
    middle = (table["capped_loss"].min() + start["initial_loss"].mean()) / 2
    is_near_initial = lost > 0 or table["capped_loss"].max() > middle
    with style():
        longest = max(map(len, series))
        is_long = longest > MOST_LETTERS
        row = 2 + LETTER * longest if is_long else 2 * (1.5 + LETTER * longest)
        width = max(3.9 * columns + 0.6, row)
        height = 3.4 * rows + 1.2 + (LINE * len(series) if is_long else 0)
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for number, (panel, width) in enumerate(zip(panels, widths, strict=False)):
            _draw_rates(panel, table[table["width"] == width], series)
            if is_near_initial:
                level = start.loc[start["width"] == width, "initial_loss"].mean()
                panel.axhline(level, color="0.4", linestyle=":", linewidth=1.4, zorder=1)
            is_lowest = number + columns >= len(widths)
            panel.set(title=f"width {width}", xlabel="peak learning rate" if is_lowest else "")
            panel.set_ylabel("" if number % columns else "final validation loss [nat/token]")
            panel.tick_params(labelbottom=is_lowest)
        for panel in panels[len(widths) :]:
            panel.set_axis_off()
        _rate_legend(figure, series, lost > 0, whose if is_near_initial else None, ncols=1 if is_long else 2)
        figure.suptitle("Final loss against learning rate")
    seeds = metrics.seed_numbers(table).nunique()
    crosses = f"crosses are the {count(lost, 'trial')} that became non-finite" if lost else "none became non-finite"
    caption = (
        "Final validation loss of the trials without a fault against the peak learning rate, at most the loss at "
        f"initialisation; lines are means over {count(seeds, 'seed')}, dots are single trials, and {crosses}."
        f"{left_out}"
    )
    return Drawing(figure, caption)


def _start(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The trials whose losses at initialisation are marked, and the legend's words for whose they are."""
    plain = table[table["mitigation"] == BASELINE]
    if table["mitigation"].nunique() == 1:
        return table, ""
    if set(plain["width"]) == set(table["width"]):
        return plain, f", mitigation: {BASELINE}"
    return table, ", mean over mitigations"


def _draw_rates(panel: Axes, table: pd.DataFrame, series: Sequence[str]) -> None:
    panel.set_xscale("log")
    colours = palette(series)
    for position, name in enumerate(series):
        own = table[table["series"] == name]
        own = own.assign(lr=dodged(own["lr"], position, len(series)))
        means = own.groupby("lr")["capped_loss"].mean().dropna()
        panel.plot(means.index, means, color=colours[name], linewidth=1.8)
        finite, lost = own[own["nonfinite_step"].isna()], own[own["nonfinite_step"].notna()]
        marker, colour = MARKERS[position % len(MARKERS)], colours[name]
        panel.scatter(finite["lr"], finite["capped_loss"], s=16, marker=marker, color=colour, zorder=3, alpha=0.8)
        panel.scatter(lost["lr"], lost["capped_loss"], s=55, marker="x", color=colour, zorder=4, linewidth=1.8)


def _rate_legend(figure: Figure, series: Sequence[str], has_crosses: bool, initial: str | None, ncols: int) -> None:
    """`initial`: whose loss at initialisation is marked; None: it is not."""
    colours = palette(series)
    handles = [
        Line2D([], [], color=colours[name], linewidth=1.8, marker=MARKERS[position % len(MARKERS)], markersize=4)
        for position, name in enumerate(series)
    ]
    labels = [f"mitigation: {name}" for name in series]
    if has_crosses:
        handles.append(Line2D([], [], color="0.35", marker="x", markersize=7, markeredgewidth=1.8, linestyle="none"))
        labels.append("non-finite trial, drawn at the loss at initialisation")
    if initial is not None:
        handles.append(Line2D([], [], color="0.4", linestyle=":", linewidth=1.4))
        labels.append(f"loss at initialisation{initial}")
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
