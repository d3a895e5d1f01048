"""Pictures of a search: what it tried in which order, and the fronts that it found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.figures.drawing import MARKERS, Drawing, palette, style
from analysis.reading.searches import History, front
from harness.basics.printing import count

MOST_CELLS, MOST_NUMBERED = 10, 8
APART = 0.7  # of the distance between two points, over which cells are spread
TELLING = 24  # pixels between two points whose numbers do not lie on each other
LINEAR_BELOW = 1e-3  # nat/token; damage is drawn on a logarithmic axis above, and 0 is on it
EDGE, FAULTS = "max_stable_lr", "worst_fault"
CROSSES = {EDGE: "rates that are not stable", FAULTS: "faults that did not break the run"}


def search_history(histories: Sequence[History]) -> Drawing:
    """Every point that was tried, in order: a row a kind of search and objective, a colour a cell.

    Of a search with one objective the line is the best value so far.
    """
    if not histories:
        return Drawing(None, "No figure: nothing has been searched here.")
    shown = _shown(histories)
    rows = [(kind, place) for kind, own in shown.items() for place in range(len(own[0].objectives))]
    with style():
        figure = Figure(figsize=(8, 3.2 * len(rows) + 0.6 + 0.12 * max(map(len, shown.values()))), layout="constrained")
        panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
        for panel, (kind, place) in zip(panels, rows, strict=True):
            _draw_history(panel, shown[kind], place)
            panel.set_title(f"search={kind}", fontsize="medium")
        panels[-1].set_xlabel("points tried in the cell")
        _legend(figure, [history for own in shown.values() for history in own])
        figure.suptitle("What the search tried")
    points = sum(len(history.points) for history in histories)
    crosses = " and ".join(words for kind, words in CROSSES.items() if kind in shown)
    words = f"{count(points, 'point')} in {count(len(histories), 'cell')}, in the order in which they were asked for."
    crosses = f" Crosses: {crosses}." if crosses else ""
    lines = " Lines are the largest stable rate so far." if EDGE in shown else ""
    return Drawing(figure, f"{words}{crosses}{lines}{_left_out(histories)}")


def pareto_front(histories: Sequence[History]) -> Drawing:
    """Both objectives against each other, and the front: a panel a kind of search, a colour a cell."""
    shown = _shown([history for history in histories if len(history.objectives) == 2])
    if not shown:
        return Drawing(None, "No figure: nothing has been searched here with two objectives.")
    with style():
        cells = max(map(len, shown.values()))
        figure = Figure(figsize=(6.4 * len(shown) + 0.6, 5 + 0.25 * cells), layout="constrained")
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        numbered: list[str] = []
        for panel, (kind, own) in zip(panels, shown.items(), strict=True):
            for position, history in enumerate(own):
                _draw_front(panel, history, _colour(own, position), MARKERS[position], len(own) == 1, numbered)
            panel.set(title=f"search={kind}", xlabel=own[0].objectives[0], ylabel=own[0].objectives[1])
        _legend(figure, [history for own in shown.values() for history in own])
        figure.suptitle("Pareto front")
    crosses = f" Crosses: {CROSSES[FAULTS]}." if FAULTS in shown else ""
    words = f" Numbered: {'; '.join(numbered)}." if numbered else ""
    caption = (
        "Each point that was tried, by its two objectives; the line joins those that no other point of the cell beats "
        f"in both.{crosses}{words}{_left_out(histories)}"
    )
    return Drawing(figure, caption)


def _shown(histories: Sequence[History]) -> dict[str, list[History]]:
    """By kind, at most `MOST_CELLS` of each."""
    found: dict[str, list[History]] = {}
    for history in histories:
        own = found.setdefault(history.kind, [])
        if len(own) < MOST_CELLS:
            own.append(history)
    return found


def _left_out(histories: Sequence[History]) -> str:
    number = len(histories) - sum(map(len, _shown(histories).values()))
    return f" Not shown: {count(number, 'further cell')}." if number else ""


def _colour(own: Sequence[History], position: int) -> Any:
    return list(palette([str(number) for number in range(len(own))]).values())[position]


def _draw_history(panel: Axes, own: Sequence[History], place: int) -> None:
    for position, history in enumerate(own):
        colour, points = _colour(own, position), history.points
        is_edge = history.kind == EDGE
        # A rate that is not stable counts 0 for the search, and is drawn where it was tried.
        values = points["param optim.lr"] if is_edge else points[f"objective {place}"]
        good = points["is_good"].to_numpy()
        size = 28 if len(points) < 100 else 14
        number = points["number"] + APART * ((position + 0.5) / len(own) - 0.5)
        panel.scatter(number[good], values[good], color=colour, marker=MARKERS[position], s=size, zorder=3)
        panel.scatter(number[~good], values[~good], color=colour, marker="x", s=size, zorder=2, alpha=0.8)
        if is_edge:
            best = np.maximum.accumulate(points["objective 0"].to_numpy())
            best = np.where(best > 0, best, np.nan)
            panel.plot(number, best, color=colour, drawstyle="steps-post", linewidth=1.4, alpha=0.8)
    if own[0].kind == EDGE:
        panel.set_yscale("log")
    elif own[0].kind == FAULTS and place == 1:
        panel.set_yscale("symlog", linthresh=LINEAR_BELOW)
    label = "learning rate" if own[0].kind == EDGE else own[0].objectives[place]
    panel.set_ylabel(label.replace(": ", ":\n"))
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_front(
    panel: Axes, history: History, colour: Any, marker: str, is_numbered: bool, numbered: list[str]
) -> None:
    points, best = history.points, front(history.points, history.directions)
    good = points["is_good"].to_numpy() | (history.kind != FAULTS)
    x, y = points["objective 0"], points["objective 1"]
    panel.scatter(x[good], y[good], color=colour, marker=marker, s=26, alpha=0.5)
    panel.scatter(x[~good], y[~good], color=colour, marker="x", s=26, alpha=0.5)
    if history.kind == FAULTS:
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


def _legend(figure: Figure, shown: Sequence[History]) -> None:
    """The cells, each once; none for a single one."""
    by_kind: dict[str, list[History]] = {}
    for history in shown:
        by_kind.setdefault(history.kind, []).append(history)
    handles, labels = [], []
    for kind, own in by_kind.items():
        for position, history in enumerate(own if len(own) > 1 else ()):
            look = {"color": _colour(own, position), "marker": MARKERS[position], "linestyle": "none"}
            handles.append(Line2D([], [], **look))
            labels.append(history.cell if len(by_kind) == 1 else f"{kind}: {history.cell}")
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) < 40 else 1)


SEARCH_FIGURES: dict[str, Callable[[Sequence[History]], Drawing]] = {
    "search_history": search_history,
    "pareto_front": pareto_front,
}
