"""What figures of searches share: which cells they show, and their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.drawing import looks
from analysis.figures.legends import legend_below
from analysis.reading.searches import History
from harness.basics.printing import count
from harness.config.names import MAX_STABLE_RATE, WORST_FAULT

MOST_CELLS = 10
LINEAR_BELOW = 1e-3  # nat/token; damage is drawn on a logarithmic axis above, and 0 is on it
CROSSES = {MAX_STABLE_RATE: "rates that are not stable", WORST_FAULT: "faults that did not break the run"}


def shown_cells(histories: Sequence[History]) -> dict[str, list[History]]:
    """By kind, at most `MOST_CELLS` of each."""
    kinds = dict.fromkeys(history.kind for history in histories)
    return {kind: [history for history in histories if history.kind == kind][:MOST_CELLS] for kind in kinds}


def left_out(histories: Sequence[History]) -> str:
    """How many cells the figure does not show, for its caption; empty where it shows all."""
    number = len(histories) - sum(map(len, shown_cells(histories).values()))
    return f" Not shown: {count(number, 'further cell')}." if number else ""


def looks_of(cells: Sequence[History]) -> list[dict[str, Any]]:
    """Colour and marker of each cell, as keywords of matplotlib."""
    return [*looks([str(number) for number in range(len(cells))]).values()]


def legend(figure: Figure, shown: Mapping[str, Sequence[History]]) -> None:
    """The cells of `shown_cells`, each once; none for a single one."""
    handles = {
        history.cell if len(shown) == 1 else f"{kind}: {history.cell}": Line2D([], [], **look, linestyle="none")
        for kind, cells in shown.items()
        for history, look in zip(cells, looks_of(cells), strict=True)
        if len(cells) > 1
    }
    if handles:
        for name, handle in handles.items():
            handle.set_label(name)
        legend_below(figure, [*handles.values()])
