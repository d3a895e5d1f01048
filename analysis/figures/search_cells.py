"""What figures of searches share: which cells they show, and their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.drawing import MARKERS, palette
from analysis.reading.searches import History
from harness.basics.printing import count
from harness.config.names import MAX_STABLE_RATE, WORST_FAULT

MOST_CELLS = 10
LINEAR_BELOW = 1e-3  # nat/token; damage is drawn on a logarithmic axis above, and 0 is on it
CROSSES = {MAX_STABLE_RATE: "rates that are not stable", WORST_FAULT: "faults that did not break the run"}


def shown_cells(histories: Sequence[History]) -> dict[str, list[History]]:
    """By kind, at most `MOST_CELLS` of each."""
    found: dict[str, list[History]] = {}
    for history in histories:
        cells = found.setdefault(history.kind, [])
        if len(cells) < MOST_CELLS:
            cells.append(history)
    return found


def left_out(histories: Sequence[History]) -> str:
    number = len(histories) - sum(map(len, shown_cells(histories).values()))
    return f" Not shown: {count(number, 'further cell')}." if number else ""


def colour_of(cells: Sequence[History], position: int) -> Any:
    return list(palette([str(number) for number in range(len(cells))]).values())[position]


def legend(figure: Figure, shown: Mapping[str, Sequence[History]]) -> None:
    """The cells of `shown_cells`, each once; none for a single one."""
    handles, labels = [], []
    for kind, cells in shown.items():
        for position, history in enumerate(cells if len(cells) > 1 else ()):
            look = {"color": colour_of(cells, position), "marker": MARKERS[position], "linestyle": "none"}
            handles.append(Line2D([], [], **look))
            labels.append(history.cell if len(shown) == 1 else f"{kind}: {history.cell}")
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) < 40 else 1)
