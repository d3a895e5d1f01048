"""Legends under a figure, which fit into it, and what the signs in mitigations' names mean."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from matplotlib.artist import Artist
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.series import LETTER
from analysis.reading.acted import MARK

HANDLE, LINE = 0.8, 0.21  # inches: of what stands before a label and after it, and of a line


def signs(names: Iterable[str]) -> list[Line2D]:
    """Entries of a legend for the signs behind mitigations' names: what a † means, where one has it."""
    words = f"{MARK.strip()} did not act as named in any trial of some width"
    is_marked = any(MARK in name for name in names)
    return [Line2D([], [], linestyle="none", label=words)] if is_marked else []


def legend_below(figure: Figure, handles: Sequence[Artist | Container], most: int = 2, title: str = "") -> None:
    """A legend under the panels in at most so many columns, as many as fit; the figure grows where one does not."""
    labels = [str(handle.get_label()) for handle in handles]
    width = max(figure.get_figwidth(), _width(labels))
    columns = next((number for number in range(min(most, len(labels)), 1, -1) if _fits(labels, number, width)), 1)
    more = math.ceil(len(labels) / columns) - math.ceil(len(labels) / most)
    figure.set_size_inches(width, figure.get_figheight() + LINE * more)
    figure.legend(handles=handles, title=title or None, loc="outside lower center", ncols=columns, frameon=False)


def _fits(labels: Sequence[str], columns: int, width: float) -> bool:
    """A legend fills its columns one after the other."""
    rows = math.ceil(len(labels) / columns)
    return sum(_width(labels[first : first + rows]) for first in range(0, len(labels), rows)) <= width


def _width(labels: Sequence[str]) -> float:
    return HANDLE + LETTER * max(map(len, labels), default=0)
