"""The final loss against the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.figures.drawing import CROSS, Drawing, looks, page, panels_in_grid
from analysis.figures.legends import LINE, legend_below, signs
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES, chosen, nested, series_of, with_short_names
from analysis.measures import metrics
from analysis.measures.quality import without_policies
from analysis.reading.acted import BASELINE
from analysis.reading.levels import in_order, is_level
from harness.basics.printing import count


@drawn_from(Needs.SWEEP, place=1, points="x=lr&y=final_validation_loss&colour=mitigation")
def loss_against_rate(results: Results) -> Drawing:
    """Final validation loss of the clean trials against the learning rate: a panel a width, a line a mitigation.

    What is drawn is min(final loss, loss at initialisation), the quantity that LR sensitivity averages; trials that
    became non-finite are crosses at the loss at initialisation. Points are seeds. The loss at initialisation, that of
    the baseline where every width has one, is marked if any trial comes near it, for it would squeeze all others into
    the bottom.
    """
    clean = metrics.clean_trials(without_policies(results.sweep)[metrics.READ])
    table = metrics.trial_table(clean)
    axes = metrics.swept_axes(clean, table, ("width", "mitigation"))
    table = table[table["capped_loss"].notna() & (table["lr"] > 0)].assign(series=lambda t: series_of(t, axes[1:]))
    if table["lr"].nunique() < 2:
        return Drawing(
            None,
            f"No figure: {count(table['lr'].nunique(), 'learning rate')} among the finished, validated trials.",
        )
    table, at_one_rate = _at_several_rates(table)
    series, left_out = chosen(table.groupby("series")["capped_loss"].mean(), MOST_SERIES)
    table, series = with_short_names(table, axes[1:], series)
    widths = in_order(table["width"])
    columns = len(widths) if len(widths) <= 3 else math.ceil(math.sqrt(len(widths)))
    lost = int(table["nonfinite_step"].notna().sum())
    start, whose = _start(table)
    middle = (table["capped_loss"].min() + start["initial_loss"].mean()) / 2
    is_near_initial = lost > 0 or table["capped_loss"].max() > middle
    handles = _handles(series, lost > 0, whose if is_near_initial else None)
    height = 3.4 * math.ceil(len(widths) / columns) + 0.7 + LINE * math.ceil(len(handles) / 2)
    with page(3.9 * columns + 0.6, height, "Final loss against learning rate") as figure:
        labels = "peak learning rate", "final validation loss [nat/token]"
        panels = panels_in_grid(figure, len(widths), columns, *labels)
        for panel, width in zip(panels, widths, strict=True):
            _draw_rates(panel, table[is_level(table["width"], width)], series)
            if is_near_initial:
                level = start.loc[is_level(start["width"], width), "initial_loss"].mean()
                panel.axhline(level, color="0.4", linestyle=":", linewidth=1.4, zorder=1)
            panel.set_title("no width" if pd.isna(width) else f"width {width:g}")
        legend_below(figure, handles)
    seeds = metrics.seed_numbers(table).nunique()
    crosses = f"crosses are the {count(lost, 'trial')} that became non-finite" if lost else "none became non-finite"
    caption = (
        "Final validation loss of the trials without a fault against the peak learning rate, at most the loss at "
        f"initialisation; lines are means over {count(seeds, 'seed')}, dots are single trials, and {crosses}."
        f"{left_out}{at_one_rate}"
    )
    return Drawing(figure, caption)


def _at_several_rates(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows of series that have several rates at their width, if any has, and what the caption says of others."""
    lines = table.groupby(["series", "width"], dropna=False)["lr"]
    has_several = lines.transform("nunique") > 1
    if not has_several.any() or has_several.all():
        return table, ""
    left_out = count(int((lines.nunique() == 1).sum()), "combination")
    return table[has_several], f" Not shown: {left_out} at a single rate."


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
    for position, (name, look) in enumerate(looks(series).items()):
        line, size = table[table["series"] == name], nested(position, len(series))
        means = line.groupby("lr")["capped_loss"].mean().dropna()
        panel.plot(means.index, means, color=look["color"], linewidth=1.8 * size)
        finite, lost = line[line["nonfinite_step"].isna()], line[line["nonfinite_step"].notna()]
        panel.scatter(finite["lr"], finite["capped_loss"], **look, s=16 * size**2, zorder=3, alpha=0.8)
        panel.scatter(lost["lr"], lost["capped_loss"], **look | {"marker": "x"}, s=55 * size, zorder=4, linewidth=1.8)


def _handles(series: Sequence[str], has_crosses: bool, initial: str | None) -> list[Line2D]:
    """Of the legend. `initial`: whose loss at initialisation is marked; None: it is not."""
    handles = [
        Line2D([], [], **look, linewidth=1.8, markersize=4, label=f"mitigation: {name}")
        for name, look in looks(series).items()
    ]
    if has_crosses:
        name = "non-finite trial, drawn at the loss at initialisation"
        handles.append(Line2D([], [], **CROSS, color="0.35", linestyle="none", label=name))
    if initial is not None:
        name = f"loss at initialisation{initial}"
        handles.append(Line2D([], [], color="0.4", linestyle=":", linewidth=1.4, label=name))
    return handles + signs(series)
