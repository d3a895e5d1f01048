"""LR sensitivity against the width of the model."""

from __future__ import annotations

import math

import numpy as np

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import LINE, legend_below, signs
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.series import MOST_SERIES, beside, chosen, mark_widths, series_of, with_short_names, with_widths
from analysis.measures import metrics


@drawn_from(Needs.SWEEP, place=3, points="x=width&y=final_validation_loss&colour=mitigation")
def sensitivity_against_width(results: Results) -> Drawing:
    """LR sensitivity against width, a line a mitigation, with intervals over seeds and held-out text."""
    table = results.sensitivity
    axes = metrics.group_axes(table)
    table = table[table["sensitivity"].notna()].assign(series=lambda t: series_of(t, axes[1:]))
    table, without = with_widths(table)
    if table.empty:
        reason = "the trials have no width" if without else "no width has finished trials at two learning rates or more"
        return Drawing(None, f"No figure: {reason}.")
    series, left_out = chosen(table.groupby("series")["sensitivity"].mean(), MOST_SERIES)
    table, series = with_short_names(table, axes[1:], series)
    widths = sorted(table["width"].unique())
    with page(6.4, 4.6 + LINE * math.ceil(len(series) / 2)) as figure:
        panel = figure.subplots()
        for position, (name, look) in enumerate(looks(series).items()):
            line = table[table["series"] == name].sort_values("width")
            value = line["sensitivity"]
            reach = np.array([value - line["low"], line["high"] - value]).clip(min=0)
            x = beside(line["width"], widths, position, len(series))
            panel.errorbar(x, value, reach, **look, capsize=4, label=f"mitigation: {name}")
        mark_widths(panel, widths)
        panel.set_ylim(bottom=min(0, *panel.get_ylim()))
        panel.set(title="Learning-rate sensitivity against width", xlabel="width of the model")
        panel.set_ylabel("LR sensitivity [nat/token]")
        legend_below(figure, [*panel.get_legend_handles_labels()[0], *signs(series)])
    seeds = int(table["seeds"].max())
    bars = f"bars are 95% intervals over {seeds} seeds and the held-out text"
    bars = bars if seeds > 1 else "one seed, so no intervals"
    ranges = table[["lowest_rate", "highest_rate", "rates"]].drop_duplicates()
    span = f"{table['lowest_rate'].min():g} to {table['highest_rate'].max():g}"
    warning = "" if len(ranges) == 1 else "; groups cover different rates, so their values cannot be compared"
    caption = f"How far the loss rises above its best over learning rates {span} (lower is steadier); {bars}{warning}."
    return Drawing(figure, caption + left_out + without)
