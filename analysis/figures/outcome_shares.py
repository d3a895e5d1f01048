"""What became of the faults of a campaign, by site and by time. Clean trials are left out, as in all its figures."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis.figures.drawing import Drawing, page
from analysis.figures.legends import legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.judged_faults import COLOURS, fault_table, idle_words
from analysis.measures.outcomes import IDLE, LINGERING, MASKED, OUTCOMES, RECOVERED
from analysis.measures.statistics import studied
from harness.basics.printing import count

LIGHT = (MASKED, RECOVERED, LINGERING)  # colours on which writing is dark
TIME_BINS = 5
BAR, LETTER, SHORTEST = 0.46, 0.085, 2.3  # inches a bar, and a letter; bars that a title of two lines takes
NARROWEST = 0.045  # share of a bar that has room for a number


@drawn_from(Needs.OUTCOMES, place=2, points="x=struck_site&y=deviation_max&colour=fault_outcome")
def outcome_shares(results: Results) -> Drawing:
    """Share of each outcome as stacked bars with counts: one a site, and one a stretch of time when faults began."""
    table = fault_table(results.judged)
    if table.empty:
        return Drawing(None, "No figure: no fault is judged, since none is finished together with its golden twin.")
    times, what = _times(table)
    groups = {"site": (table["site"], "site of the fault"), "time": (times, what)}
    heights = [max(labels.nunique() + 0.3, SHORTEST) for labels, _ in groups.values()]
    with page(10, BAR * sum(heights) + 1.8, "What became of the faults") as figure:
        panels = figure.subplots(2, height_ratios=heights, sharex=True)
        for panel, (labels, title), height in zip(panels, groups.values(), heights, strict=True):
            _draw_shares(panel, table["outcome"], labels)
            panel.set_ylabel(textwrap.fill(title, int(BAR * height / LETTER)))
        panels[-1].set_xlabel("share of the faults [%]")
        figure.align_ylabels()
        handles = [Patch(color=COLOURS[outcome], label=outcome) for outcome in OUTCOMES]
        legend_below(figure, handles, most=len(OUTCOMES))
    caption = f"Outcomes of {count(len(table), 'fault')} by {groups['site'][1]} and by {what}; numbers are faults."
    if left_out := int((studied(results.judged)["fault_outcome"].values != IDLE).sum()) - len(table):
        caption += f" {count(left_out, 'fault')} unfinished or without a golden twin to judge by not counted."
    return Drawing(figure, caption + idle_words(results.judged))


def _times(table: pd.DataFrame) -> tuple[pd.Series, str]:
    """A label for when each fault began, such that labels sort by time, and what they mean."""
    if table["start"].nunique() <= TIME_BINS and table["steps"].nunique() == 1:
        return pd.Series(pd.Categorical(table["start"].astype(int), ordered=True)), "first step of the fault"
    part = np.minimum(table["start"] * TIME_BINS // table["steps"], TIME_BINS - 1).astype(int)
    if table["steps"].nunique() == 1:
        edges = np.ceil(np.arange(TIME_BINS + 1) * table["steps"].iloc[0] / TIME_BINS).astype(int)
        names = [f"{edges[i]} to {edges[i + 1] - 1}" for i in range(TIME_BINS)]
        return pd.Series(pd.Categorical.from_codes(part, names, ordered=True)), "first step of the fault"
    names = [f"{100 * i // TIME_BINS} to {100 * (i + 1) // TIME_BINS}%" for i in range(TIME_BINS)]
    return pd.Series(pd.Categorical.from_codes(part, names, ordered=True)), "first step of the fault, in % of the run"


def _draw_shares(panel: Axes, outcome: pd.Series, labels: pd.Series) -> None:
    counts = pd.crosstab(labels, outcome).reindex(columns=list(OUTCOMES), fill_value=0)
    counts = counts[counts.sum(axis=1) > 0]
    total = counts.sum(axis=1).to_numpy()
    left = np.zeros(len(counts))
    for name in OUTCOMES:
        share = counts[name].to_numpy() / total
        panel.barh(range(len(counts)), 100 * share, left=100 * left, height=0.75, color=COLOURS[name], linewidth=0)
        for row in np.flatnonzero(share >= NARROWEST):
            middle, colour = 100 * (left[row] + share[row] / 2), "0.15" if name in LIGHT else "white"
            text = str(counts[name].iloc[row])
            panel.text(middle, float(row), text, ha="center", va="center", fontsize="small", color=colour)
        left += share
    panel.set_yticks(range(len(counts)), [f"{label} (n = {n})" for label, n in zip(counts.index, total, strict=True)])
    panel.grid(False, axis="y")
    panel.set(xlim=(0, 100), ylim=(len(counts) - 0.5, -0.5))
