"""By how many steps signals and detectors lead the spike of the loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.figures.drawing import Drawing, page
from analysis.figures.legends import legend_below
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.measures.detectors import measured
from analysis.measures.lead import DETECTOR, SIGNAL, lead_table, leads

BINS: tuple[tuple[float, float, str], ...] = (
    (10, np.inf, "10 steps and more before"),
    (3, 10, "3 to 9 before"),
    (1, 3, "1 or 2 before"),
    (0, 1, "at the same step"),
    (-np.inf, 0, "later"),
)
COLOURS = ("#1b4f72", "#2e86c1", "#85c1e9", "#f0c75e", "#dd7442", "#d9d9d9")


@drawn_from(Needs.INCIDENTS, place=2)
def loss_lead(results: Results) -> Drawing:
    """A bar a signal and a detector: in which share of the spikes it came how long before the loss."""
    found = leads(results.sweep, measured(results.sweep))
    if found.empty:
        return Drawing(None, "No figure: no fault has the loss spike.")
    order = lead_table(found)
    heights = [(order["what"] == kind).sum() for kind in (SIGNAL, DETECTOR)]
    with page(10, 0.34 * sum(heights) + 2.4, "What leads the spike of the loss") as figure:
        panels = figure.subplots(2, height_ratios=[max(height, 1) for height in heights], sharex=True)
        for panel, kind, title in zip(panels, (SIGNAL, DETECTOR), ("signal leaves its range", "alarm"), strict=True):
            names = list(order.loc[order["what"] == kind, "name"])
            left = np.zeros(len(names))
            for (_, text), share, colour in zip(_labels(), _shares(found, kind, names), COLOURS, strict=True):
                panel.barh(
                    range(len(names)), 100 * share, left=left, color=colour, height=0.75, linewidth=0, label=text
                )
                left += 100 * share
            panel.set_yticks(range(len(names)), names)
            panel.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 100), ylabel=title)
            panel.grid(False, axis="y")
        figure.align_ylabels()
        panels[-1].set_xlabel("share of the spikes [%]")
        legend_below(figure, panels[0].get_legend_handles_labels()[0], most=3)
    caption = (
        "When each signal left the range of its golden run, and each detector had an alarm, relative to the step at "
        f"which the loss left its own, in {len(found)} faults whose loss did."
    )
    return Drawing(figure, caption)


def _labels() -> list[tuple[int, str]]:
    return [*enumerate([*(text for *_, text in BINS), "never"])]


def _shares(found: pd.DataFrame, kind: str, names: list[str]) -> list[np.ndarray]:
    values = np.stack([found[kind, name].to_numpy() for name in names]) if names else np.zeros((0, 1))
    shares = [((values >= low) & (values < high)).mean(axis=1) for low, high, _ in BINS]
    return [*shares, np.isnan(values).mean(axis=1)]
