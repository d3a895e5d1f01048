"""The fronts that searches with two objectives found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures.drawing import MARKERS, Drawing, style
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.search_cells import CROSSES, LINEAR_BELOW, colour_of, left_out, legend, shown_cells
from analysis.reading.searches import History, front
from harness.config.names import WORST_FAULT

MOST_NUMBERED = 8
TELLING = 24  # pixels between two points whose numbers do not lie on each other


@drawn_from(Needs.SEARCHES, place=2)
def pareto_front(results: Results) -> Drawing:
    """Both objectives against each other, and the front: a panel a kind of search, a colour a cell."""
    histories = results.searches
    shown = shown_cells([history for history in histories if len(history.objectives) == 2])
    if not shown:
        return Drawing(None, "No figure: nothing has been searched here with two objectives.")
    with style():
        most = max(map(len, shown.values()))
        figure = Figure(figsize=(6.4 * len(shown) + 0.6, 5 + 0.25 * most), layout="constrained")
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        numbered: list[str] = []
        for panel, (kind, cells) in zip(panels, shown.items(), strict=True):
            for position, history in enumerate(cells):
                _draw_front(panel, history, colour_of(cells, position), MARKERS[position], len(cells) == 1, numbered)
            panel.set(title=f"search={kind}", xlabel=cells[0].objectives[0], ylabel=cells[0].objectives[1])
        legend(figure, shown)
        figure.suptitle("Pareto front")
    crosses = f" Crosses: {CROSSES[WORST_FAULT]}." if WORST_FAULT in shown else ""
    words = f" Numbered: {'; '.join(numbered)}." if numbered else ""
    caption = (
        "Each point that was tried, by its two objectives; the line joins those that no other point of the cell beats "
        f"in both.{crosses}{words}{left_out(histories)}"
    )
    return Drawing(figure, caption)


def _draw_front(
    panel: Axes, history: History, colour: Any, marker: str, is_numbered: bool, numbered: list[str]
) -> None:
    points, best = history.points, front(history.points, history.directions)
    good = points["is_good"].to_numpy() | (history.kind != WORST_FAULT)
    x, y = points["objective 0"], points["objective 1"]
    panel.scatter(x[good], y[good], color=colour, marker=marker, s=26, alpha=0.5)
    panel.scatter(x[~good], y[~good], color=colour, marker="x", s=26, alpha=0.5)
    if history.kind == WORST_FAULT:
        panel.set_yscale("symlog", linthresh=LINEAR_BELOW)
    panel.plot(best["objective 0"], best["objective 1"], color=colour, linewidth=1.6, drawstyle="steps-post")
    panel.scatter(best["objective 0"], best["objective 1"], color=colour, marker=marker, s=48, edgecolor="k", zorder=4)
    if is_numbered:
        _number(panel, best[best["is_good"]], numbered)


def _number(panel: Axes, best: pd.DataFrame, numbered: list[str]) -> None:
    """Number points of the front that can be told apart, spread over it, and say in `numbered` which they are."""
    panel.get_xlim(), panel.get_ylim()  # what was drawn counts for the limits from here on
    apart: list[tuple[np.ndarray, dict[str, Any]]] = []
    for row in best.to_dict("records"):
        pixel = panel.transData.transform((row["objective 0"], row["objective 1"]))
        if all(np.abs(pixel - other).max() > TELLING for other, _ in apart):
            apart.append((pixel, row))
    chosen = np.unique(np.linspace(0, len(apart) - 1, min(len(apart), MOST_NUMBERED)).round().astype(int))
    for number, place in enumerate(chosen, start=1):
        row = apart[place][1]
        where = (row["objective 0"], row["objective 1"])
        panel.annotate(str(number), where, textcoords="offset points", xytext=(6, 5), fontsize="small")
        numbered.append(f"{number}: {row['point']}")
