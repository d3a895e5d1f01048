"""What a search tried, in which order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.figures.drawing import Drawing, page
from analysis.figures.registry import Needs, Results, drawn_from
from analysis.figures.search_cells import CROSSES, LINEAR_BELOW, left_out, legend, looks_of, shown_cells
from analysis.reading.searches import History
from harness.basics.printing import count
from harness.config.names import MAX_STABLE_RATE, WORST_FAULT

APART = 0.7  # of the distance between two points, over which cells are spread


@drawn_from(Needs.SEARCHES, place=1)
def search_history(results: Results) -> Drawing:
    """Every point that was tried, in order: a row a kind of search and objective, a colour a cell.

    Of a search with one objective the line is the best value so far.
    """
    histories = results.searches
    if not histories:
        return Drawing(None, "No figure: nothing has been searched here.")
    shown = shown_cells(histories)
    rows = [(kind, place) for kind, cells in shown.items() for place in range(len(cells[0].objectives))]
    height = 3.2 * len(rows) + 0.6 + 0.12 * max(map(len, shown.values()))
    with page(8, height, "What the search tried") as figure:
        panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
        for panel, (kind, place) in zip(panels, rows, strict=True):
            _draw_history(panel, shown[kind], place)
            panel.set_title(f"search={kind}", fontsize="medium")
        panels[-1].set_xlabel("points tried in the cell")
        legend(figure, shown)
    points = sum(len(history.points) for history in histories)
    crosses = " and ".join(meaning for kind, meaning in CROSSES.items() if kind in shown)
    tried = f"{count(points, 'point')} in {count(len(histories), 'cell')}, in the order in which they were asked for."
    crosses = f" Crosses: {crosses}." if crosses else ""
    lines = " Lines are the largest stable rate so far." if MAX_STABLE_RATE in shown else ""
    return Drawing(figure, f"{tried}{crosses}{lines}{left_out(histories)}")


def _draw_history(panel: Axes, cells: Sequence[History], place: int) -> None:
    for position, (history, look) in enumerate(zip(cells, looks_of(cells), strict=True)):
        points = history.points
        is_edge = history.kind == MAX_STABLE_RATE
        # A rate that is not stable counts 0 for the search, and is drawn where it was tried.
        values = points["param optim.lr"] if is_edge else points[f"objective {place}"]
        good = points["is_good"].to_numpy()
        size = 28 if len(points) < 100 else 14
        number = points["number"] + APART * ((position + 0.5) / len(cells) - 0.5)
        panel.scatter(number[good], values[good], **look, s=size, zorder=3)
        panel.scatter(number[~good], values[~good], **look | {"marker": "x"}, s=size, zorder=2, alpha=0.8)
        if is_edge:
            best = np.maximum.accumulate(points["objective 0"].to_numpy())
            best = np.where(best > 0, best, np.nan)
            panel.plot(number, best, color=look["color"], drawstyle="steps-post", linewidth=1.4, alpha=0.8)
    if cells[0].kind == MAX_STABLE_RATE:
        panel.set_yscale("log")
    elif cells[0].kind == WORST_FAULT and place == 1:
        panel.set_yscale("symlog", linthresh=LINEAR_BELOW)
    label = "learning rate" if cells[0].kind == MAX_STABLE_RATE else cells[0].objectives[place]
    panel.set_ylabel(label.replace(": ", ":\n"))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
