"""What each detector sees against how often it is wrong, as its thresholds move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import xarray as xr
from matplotlib.axes import Axes

from analysis.figures.drawing import Drawing, looks, page
from analysis.figures.legends import legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.detectors import PER, measured, watched
from analysis.measures.known_faults import DAMAGING, KnownFaults
from analysis.measures.leaderboard import FACTORS, tradeoff

TRAINSDC = 0.61  # false alarms in 1,000 steps: one in 1,628


@drawn_from(Needs.INCIDENTS, place=1)
def detector_tradeoff(results: Results) -> Drawing:
    """A line a detector: recall of damaging incidents over false alarms, with its own constants marked.

    The axis of false alarms is logarithmic; what has none stands at its left end, at half an alarm.
    """
    names = measured(results.sweep)
    return drawn_tradeoff(watched(results.sweep, names).load(), KnownFaults.of(results.sweep), names)


def drawn_tradeoff(sweep: xr.Dataset, incidents: KnownFaults, names: Sequence[str]) -> Drawing:
    """The same of these detectors; `sweep` has what they watch."""
    damaging = int(incidents.table["size"].isin(DAMAGING).sum())
    if not damaging or not len(incidents.clean):
        return Drawing(None, "No figure: it wants faults that move the final loss, and golden runs that trained.")
    table = tradeoff(sweep, incidents, names)
    steps = int(table["clean_steps"].max()) if len(table) else 0
    if not steps:
        return Drawing(None, "No figure: it wants a detector whose signals are there, and steps of golden runs.")
    order = list(table[table["factor"] == 1].sort_values("recall", ascending=False)["detector"])
    with page(9.5, 6, "Recall against false alarms") as figure:
        panel = figure.subplots()
        draw_detectors(panel, table.assign(shown=100 * table["recall"]), order, PER / steps / 2, labels=_label)
        panel.axvline(TRAINSDC, color="0.5", linestyle=":", linewidth=1.2)
        place = panel.get_xaxis_transform()
        panel.text(TRAINSDC, 1.01, "TrainSDC", ha="center", color="0.4", fontsize="small", transform=place)
        panel.set(xlabel="false alarms in 1,000 clean steps", ylabel="damaging incidents seen [%]", ylim=(0, 100))
        legend_below(figure, panel.get_legend_handles_labels()[0], most=3, title="detector (recall, own constants)")
    caption = (
        f"Recall of {damaging} faults that moved the final loss by more than ten clean envelopes or ended in NaN, "
        f"against false alarms in {steps:,} clean steps, as all thresholds of a detector move from {FACTORS[0]:g} to "
        f"{FACTORS[-1]:g} times its own (marked). Dotted: the false alarms of TrainSDC's detector on its own runs."
    )
    return Drawing(figure, caption)


def draw_detectors(
    panel: Axes, table: pd.DataFrame, order: Sequence[str], least: float, labels: Callable[[pd.DataFrame], str]
) -> None:
    """A line a detector: `shown` over `false_alarms`, at least `least`, as its thresholds move; its own are marked.

    `labels` has the words of the legend for the row with its own.
    """
    look = looks(order)
    for name in order:
        line = table[table["detector"] == name].sort_values("factor")
        seen, wrong = line["shown"], line["false_alarms"].clip(lower=least)
        panel.plot(wrong, seen, color=look[name]["color"], linewidth=1.4, alpha=0.8)
        own = (line["factor"] == 1).to_numpy()
        panel.plot(wrong[own], seen[own], **look[name], markersize=9, linestyle="none", label=labels(line[own]))
    panel.set_xscale("log")


def _label(own: pd.DataFrame) -> str:
    return f"{own['detector'].iloc[0]} ({100 * own['recall'].iloc[0]:.0f}%)"
