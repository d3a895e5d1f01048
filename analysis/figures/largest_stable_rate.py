"""The largest learning rate at which every seed trains, against the width."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import legend_below, signs
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES, beside, chosen, mark_widths, series_of, with_short_names, with_widths
from analysis.measures import metrics
from harness.objectives.outcome import TRAINED


def edge_table(ds: xr.Dataset) -> pd.DataFrame:
    """One row a group of finished trials without a fault: its axes, `stable`, `unstable`, `seeds`, `rates`.

    A group has one width, one mitigation and one value of whatever else the sweep varies. `unstable` is the smallest
    rate at which a seed did not train to the end (NaN: none), `stable` the largest one below it at which all seeds did
    (NaN: none). Rates are peak learning rates; `rates` is how many of them were tried, `seeds` the fewest at any.
    """
    clean = metrics.clean_trials(ds[["fault"]])
    table = metrics.coordinates(clean)
    axes = metrics.swept_axes(clean, table, ("width", "mitigation"))
    table = table[table["complete"] & (table["lr"] > 0)]
    rows = []
    for key, group in table.groupby(axes, sort=True, dropna=False) if len(table) else ():
        by_rate = group.assign(stable=group["outcome"] == TRAINED).groupby("lr")["stable"].agg(["all", "size"])
        is_stable = by_rate["all"].cumprod().astype(bool)  # at it and at every smaller rate
        stable, others = by_rate.index[is_stable], by_rate.index[~is_stable]
        edge = stable.max() if len(stable) else np.nan, others.min() if len(others) else np.nan
        rows.append([*key, *edge, int(by_rate["size"].min()), len(by_rate)])
    return pd.DataFrame(rows, columns=[*axes, "stable", "unstable", "seeds", "rates"])


@drawn_from(Needs.SWEEP, place=2, points="kind=map&x=lr&y=width&colour=outcome")
def largest_stable_rate(results: Results) -> Drawing:
    """The largest stable learning rate against width: a line a mitigation, and a bar up to the smallest unstable one.

    It lies somewhere in the bar. What lies beyond the rates that were tried is an arrow at their end.
    """
    table = edge_table(results.sweep)
    table, without = with_widths(table[table["rates"] > 1])
    if table.empty:
        none = "no width and mitigation has two learning rates among the finished trials"
        return Drawing(None, f"No figure: {'the trials have no width' if without else none}.")
    axes = list(table.columns[1 : table.columns.get_loc("stable")])
    table = table.assign(series=series_of(table, axes))
    edges = np.log(table["stable"].fillna(table["unstable"] / 2)).groupby(table["series"]).mean()
    shown, left_out = chosen(-edges, MOST_SERIES, "lower rates")
    table, shown = with_short_names(table, axes, shown)
    widths = sorted(table["width"].unique())
    with page(max(6.4, 0.9 * len(widths) + 4), 4.9 + 0.13 * len(shown)) as figure:
        panel = figure.subplots()
        for position, (name, look) in enumerate(looks(shown).items()):
            line = table[table["series"] == name]
            _draw(panel, line.assign(x=beside(line["width"], widths, position, len(shown))), look)
        panel.set(yscale="log", xlabel="width", ylabel="peak learning rate")
        mark_widths(panel, widths)
        rates = table[["stable", "unstable"]].stack()
        panel.set_ylim(rates.min() / 2, rates.max() * 2)
        handles = [
            Line2D([], [], **look, linewidth=1.6, label=f"mitigation: {name}") for name, look in looks(shown).items()
        ]
        handles += [*_symbols(table[table["series"].isin(shown)]), *signs(shown)]
        legend_below(figure, handles)
        panel.set_title("Largest stable learning rate")
    seeds, tried = _span(table["seeds"]), _span(table["rates"])
    caption = (
        "Markers are the largest learning rate at which every seed trained to the end, below any at which one did not; "
        f"bars reach up to the smallest rate at which one did not: the limit lies within. {seeds} seeds a rate, "
        f"{tried} rates a marker. An arrow up: every seed trained at every rate; an arrow down: at no rate "
        f"did every seed.{left_out}{without}"
    )
    return Drawing(figure, caption)


def _span(numbers: pd.Series) -> str:
    """The smallest and the largest, or the only one."""
    return f"{numbers.min()} to {numbers.max()}" if numbers.nunique() > 1 else f"{numbers.min()}"


def _symbols(table: pd.DataFrame) -> list[Line2D]:
    """Entries of the legend for what is drawn of some edges: bars and arrows."""
    has_stable, has_end = table["stable"].notna(), table["unstable"].notna()
    symbols = {
        "bar: up to the smallest unstable rate": has_stable & has_end,
        "↑ every seed stable at every rate": has_stable & ~has_end,
        "↓ at no rate was every seed stable": ~has_stable,
    }
    return [Line2D([], [], linestyle="none", label=words) for words, is_so in symbols.items() if is_so.any()]


def _draw(panel: Axes, line: pd.DataFrame, look: dict[str, Any]) -> None:
    """A line's edges at their `x`."""
    colour = {"color": look["color"], "linewidth": 1.6}
    known, has_end = line[line["stable"].notna()], line["unstable"].notna()
    panel.plot(known["x"], known["stable"], **colour, marker=look["marker"], markersize=6, zorder=3)
    both = known[has_end[known.index]]
    panel.vlines(both["x"], both["stable"], both["unstable"], **colour, alpha=0.7)
    panel.scatter(both["x"], both["unstable"], color=look["color"], marker="_", s=70, zorder=3)
    open_ends = {"stable": (known[~has_end[known.index]], 1), "unstable": (line[line["stable"].isna()], -1)}
    for rate, (rows, sign) in open_ends.items():
        for x, y in zip(rows["x"], rows[rate], strict=True):
            arrow = {"arrowstyle": "->", **colour}
            panel.annotate("", (x, y * 1.6**sign), (x, y), arrowprops=arrow, annotation_clip=False)
