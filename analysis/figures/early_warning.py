"""What sounds before a run diverges by itself against how often it sounds for nothing, as thresholds move."""

from __future__ import annotations

import pandas as pd

from analysis.figures.detector_tradeoff import draw_detectors
from analysis.figures.drawing import Drawing, page
from analysis.figures.legends import legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.detectors import PER, measured, watched
from analysis.measures.early_warning import HORIZON, unaided, warning_table
from analysis.measures.leaderboard import FACTORS

MOST = 1.3  # times the longest median lead: where its axis ends


@drawn_from(Needs.INCIDENTS, place=5)
def early_warning(results: Results) -> Drawing:
    """Two panels over false alarms: of how many runs that end badly a detector warns beyond chance, and how early."""
    names = measured(results.sweep)
    runs = unaided(results.sweep)
    table = warning_table(watched(results.sweep, names).load(), names)
    if table.empty:
        return Drawing(None, "No figure: it wants runs without a fault, some of which end badly and some well.")
    least = PER / table["clean_steps"].max() / 2
    order = list(table[table["factor"] == 1].sort_values("warned", ascending=False)["detector"])
    with page(12, 5.6, "Warning of a divergence against false alarms") as figure:
        panels = figure.subplots(1, 2)
        draw_detectors(
            panels[0], table.assign(shown=100 * (table["warned"] - table["chance"])), order, least, labels=_label
        )
        draw_detectors(panels[1], table.assign(shown=table["lead"]), order, least, labels=_label)
        text = "false alarms in 1,000 steps of runs that end well"
        panels[0].set(xlabel=text, ylabel="runs that end badly, warned of beyond chance [%]", ylim=(-50, 100))
        panels[0].axhline(0, color="0.5", linewidth=1)
        longest = 1 if table["lead"].isna().all() else MOST * table["lead"].max()
        panels[1].set(xlabel=text, ylabel="median lead of the warnings [steps]", ylim=(0, longest))
        handles = panels[0].get_legend_handles_labels()[0]
        legend_below(figure, handles, most=4, title="detector (warned of, by chance)")
    caption = (
        f"{int(runs['is_lost'].sum())} runs without a fault that ended badly, and {int((~runs['is_lost']).sum())} that "
        f"ended well. Warned: an alarm in the {HORIZON} steps before the loss gave up half of what was learned; by "
        "chance: so many would be if alarms were those of runs that end well, at these steps; lead: the steps from the "
        f"first of these alarms. Thresholds move from {FACTORS[0]:g} to {FACTORS[-1]:g} times a detector's "
        "own (marked)."
    )
    return Drawing(figure, caption)


def _label(own: pd.DataFrame) -> str:
    one = own.iloc[0]
    return f"{one['detector']} ({100 * one['warned']:.0f}%, {100 * one['chance']:.0f}%)"
