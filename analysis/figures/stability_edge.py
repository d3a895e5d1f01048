"""The edge of stability: the largest learning rate at which every seed trains, against the width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.drawing import MARKERS, Drawing, palette, style
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES, in_order, is_plain, mark_widths, series_of
from analysis.measures import metrics
from harness.basics.printing import count
from harness.objectives.outcome import TRAINED

APART = 1.05  # the factor between neighbouring lines on the axis of widths


def edge_table(ds: xr.Dataset) -> pd.DataFrame:
    """One row a group of finished trials without a fault: its axes, `stable`, `unstable`, `seeds`, `rates`.

    A group has one width, one mitigation and one value of whatever else the sweep varies. `unstable` is the smallest
    rate at which a seed did not train to the end (NaN: none), `stable` the largest one below it at which all seeds did
    (NaN: none). Rates are peak learning rates; `rates` is how many of them were tried, `seeds` the fewest at any.
    """
    table = metrics.coordinates(metrics.clean_trials(ds[["fault"]]))
    axes = metrics.swept_axes(table, ("width", "mitigation"))
    table = table[table["complete"] & (table["lr"] > 0)]
    rows = []
    for key, own in table.groupby(axes, sort=True, dropna=False) if len(table) else ():
        by_rate = own.assign(stable=own["outcome"] == TRAINED).groupby("lr")["stable"].agg(["all", "size"])
        bad = by_rate.index[~by_rate["all"]]
        above = bad.min() if len(bad) else np.nan
        good = by_rate.index[by_rate["all"]]
        good = good[good < above] if len(bad) else good
        edge = {"stable": good.max() if len(good) else np.nan, "unstable": above}
        numbers = {"seeds": int(by_rate["size"].min()), "rates": len(by_rate)}
        rows.append(dict(zip(axes, key, strict=True)) | edge | numbers)
    return pd.DataFrame(rows, columns=[*axes, "stable", "unstable", "seeds", "rates"])


@drawn_from(Needs.SWEEP, place=2)
def stability_edge(results: Results) -> Drawing:
    """The largest stable learning rate against width: a line a mitigation, and a bar up to the smallest unstable one.

    The edge lies somewhere in the bar. What lies beyond the rates that were tried is an arrow at their end.
    """
    table = edge_table(results.sweep)
    table = table[table["rates"] > 1]
    if table.empty:
        return Drawing(None, "No figure: no width and mitigation has two learning rates among the finished trials.")
    axes = list(table.columns[1 : table.columns.get_loc("stable")])
    table = table.assign(series=series_of(table, axes))
    series, shown = table["series"].unique(), _chosen(table)
    widths = sorted(table["width"].unique())
    with style():
        figure = Figure(figsize=(max(6.4, 0.9 * len(widths) + 4), 4.6 + 0.13 * len(shown)), layout="constrained")
        panel = figure.subplots()
        for position, name in enumerate(shown):
            _draw(panel, table[table["series"] == name], position, len(shown), palette(shown)[name])
        panel.set(xscale="log", yscale="log", xlabel="width", ylabel="peak learning rate")
        mark_widths(panel, widths)
        rates = table[["stable", "unstable"]].stack()
        panel.set_ylim(rates.min() / 2, rates.max() * 2)
        _legend(figure, shown)
        panel.set_title("Edge of stability")
    seeds = (
        f"{table['seeds'].min()} to {table['seeds'].max()}" if table["seeds"].nunique() > 1 else table["seeds"].min()
    )
    fewer = len(series) - len(shown)
    left_out = f" Not shown: {count(fewer, 'mitigation')} with lower rates." if fewer else ""
    caption = (
        "Markers are the largest learning rate at which every seed trained to the end, below any at which one did not; "
        f"bars reach up to the smallest rate at which one did not, so the edge lies in them. {seeds} seeds a rate, "
        f"{table['rates'].min()} to {table['rates'].max()} rates a marker. An arrow up: every rate was stable; an "
        f"arrow down: none was.{left_out}"
    )
    return Drawing(figure, caption)


def _chosen(table: pd.DataFrame) -> list[str]:
    """The lines to show, in order: without a mitigation first, and of the others those with the largest rates."""
    edges = np.log(table["stable"].fillna(table["unstable"] / 2)).groupby(table["series"]).mean()
    ranked = sorted(edges.index, key=lambda name: (not is_plain(name), -edges[name], name))
    return in_order(ranked[:MOST_SERIES])


def _draw(panel: Axes, own: pd.DataFrame, position: int, lines: int, colour: Any) -> None:
    own = own.assign(x=own["width"] * APART ** (position - (lines - 1) / 2))
    marker = MARKERS[position % len(MARKERS)]
    known = own[own["stable"].notna()]
    panel.plot(known["x"], known["stable"], color=colour, linewidth=1.6, marker=marker, markersize=6, zorder=3)
    both = known[known["unstable"].notna()]
    panel.vlines(both["x"], both["stable"], both["unstable"], color=colour, linewidth=1.6, alpha=0.7)
    panel.scatter(both["x"], both["unstable"], color=colour, marker="_", s=70, zorder=3)
    for rows, rate, sign in (
        (known[known["unstable"].isna()], "stable", 1),
        (own[own["stable"].isna()], "unstable", -1),
    ):
        for x, y in zip(rows["x"], rows[rate], strict=True):
            arrow = {"arrowstyle": "->", "color": colour, "linewidth": 1.6}
            panel.annotate("", (x, y * 1.6**sign), (x, y), arrowprops=arrow, annotation_clip=False)


def _legend(figure: Figure, shown: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color=palette(shown)[name], marker=MARKERS[position % len(MARKERS)], linewidth=1.6)
        for position, name in enumerate(shown)
    ]
    labels = [f"mitigation: {name}" for name in shown]
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) < 36 else 1)
