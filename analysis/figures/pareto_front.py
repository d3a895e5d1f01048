"""The fronts that searches with two objectives found."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from analysis.figures.drawing import Drawing, page
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.search_cells import CROSSES, LINEAR_BELOW, left_out, legend, looks_of, shown_cells
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
    most = max(map(len, shown.values()))
    with page(6.4 * len(shown) + 0.6, 5 + 0.25 * most, "Pareto front") as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        numbered: list[str] = []
        for panel, (kind, cells) in zip(panels, shown.items(), strict=True):
            for history, look in zip(cells, looks_of(cells), strict=True):
                _draw_front(panel, history, look)
                if len(cells) == 1:
                    numbered += _number_front(panel, history)
            panel.set(title=f"search={kind}", xlabel=cells[0].objectives[0], ylabel=cells[0].objectives[1])
        legend(figure, shown)
    crosses = f" Crosses: {CROSSES[WORST_FAULT]}." if WORST_FAULT in shown else ""
    names = f" Numbered: {'; '.join(numbered)}." if numbered else ""
    caption = (
        "Each point that was tried, by its two objectives; the line joins those that no other point of the cell beats "
        f"in both.{crosses}{names}{left_out(histories)}"
    )
    return Drawing(figure, caption)


def _draw_front(panel: Axes, history: History, look: dict[str, Any]) -> None:
    points, best = history.points, front(history.points, history.directions)
    good = points["is_good"].to_numpy() | (history.kind != WORST_FAULT)
    x, y = points["objective 0"], points["objective 1"]
    panel.scatter(x[good], y[good], **look, s=26, alpha=0.5)
    panel.scatter(x[~good], y[~good], **look | {"marker": "x"}, s=26, alpha=0.5)
    if history.kind == WORST_FAULT:
        panel.set_yscale("symlog", linthresh=LINEAR_BELOW)
    x, y = best["objective 0"], best["objective 1"]
    panel.plot(x, y, color=look["color"], linewidth=1.6, drawstyle="steps-post")
    panel.scatter(x, y, **look, s=48, edgecolor="k", zorder=4)


def _number_front(panel: Axes, history: History) -> list[str]:
    """Number good points of the front that can be told apart, spread over it, and say which they are."""
    panel.get_xlim(), panel.get_ylim()  # what was drawn counts for the limits from here on
    best = front(history.points, history.directions)
    apart: list[tuple[np.ndarray, dict[str, Any]]] = []
    for row in best[best["is_good"]].to_dict("records"):
        pixel = panel.transData.transform((row["objective 0"], row["objective 1"]))
        if all(np.abs(pixel - other).max() > TELLING for other, _ in apart):
            apart.append((pixel, row))
    chosen = np.unique(np.linspace(0, len(apart) - 1, min(len(apart), MOST_NUMBERED)).round().astype(int))
    rows = [apart[place][1] for place in chosen]
    for number, row in enumerate(rows, start=1):
        where = (row["objective 0"], row["objective 1"])
        panel.annotate(str(number), where, textcoords="offset points", xytext=(6, 5), fontsize="small")
    return [f"{number}: {row['point']}" for number, row in enumerate(rows, start=1)]
