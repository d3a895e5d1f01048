"""The legend of the heat map of mitigations: its colours, and what cells and the signs in them mean."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath

from analysis.figures.mitigation_words import NOTHING
from analysis.reading.acted import MARK

# Red is worse, blue better; colour-blind readers can tell them apart (ColorBrewer). Darker ends would hide the numbers.
COLOURS = ListedColormap(colormaps["RdBu"](np.linspace(0.07, 0.93, 257)))
PALE = 0.3  # of its colour has a cell whose change may be none
MISSING: dict[str, Any] = {"facecolor": "0.92", "edgecolor": "0.7", "hatch": "////", "linewidth": 0}
CELL_EDGE: dict[str, Any] = {"edgecolor": "0.8", "linewidth": 0.5}
BASELINE_EDGE: dict[str, Any] = {"edgecolor": "0.3", "linewidth": 1, "zorder": 2}
TOLD, UNTOLD = "0.1", "0.35"  # of numbers
# Inches: the colour bar with its words, a line, a sample of a cell, between columns and margins.
BAR, LINE, SAMPLE, GAP, MARGIN = 0.62, 0.24, 0.42, 0.3, 0.15
SIGNS = {
    MARK.strip(): "the mitigation did not act as named",
    "≥": "mean rate: some seed stable at every swept one",
    "<": "mean rate: no seed stable at any swept one",
    "≈": "mean rate: some seeds at none; time: shared packs",
    "∞": "became non-finite",
    ">": "not back by the end of the run",
}
"""What stands before or behind a number."""
NUMBER = "1.2"


@dataclass(frozen=True)
class LegendEntry:
    """A sample of a cell, and what it means."""

    sample: str
    words: str
    cell: dict[str, Any]
    weight: str = "normal"
    colour: str = UNTOLD


def pale(colour: np.ndarray) -> np.ndarray:
    """RGB of a cell whose change may be none."""
    return 1 - PALE * (1 - colour)


def text_width(label: str) -> float:
    """Inches that a label takes at most: letters on whole pixels stand further apart than the outlines say."""
    return _width_in(label, tuple(matplotlib.rcParams["font.family"]))


@lru_cache(maxsize=4096)
def _width_in(label: str, family: tuple[str, ...]) -> float:
    """Kept, since a legend asks for the same words again and again, and outlines take some 50 ms."""
    with matplotlib.rc_context({"text.parse_math": False}):
        return 1.06 * TextPath((0, 0), label, size=9, prop=FontProperties(family=list(family))).get_extents().width / 72


def entries_of(cells: Collection[str], has_told: bool) -> list[LegendEntry]:
    """Of a map with these words in its cells, some of which are bold if it `has_told`."""
    blue = np.array(COLOURS(0.8))[:3]
    found = [
        LegendEntry(NUMBER, "the baseline", {"facecolor": "white", **BASELINE_EDGE}, "bold", TOLD),
        LegendEntry(
            NUMBER,
            "pale, grey: no change can be told, or there is no interval",
            {"facecolor": pale(blue), **CELL_EDGE},
        ),
    ]
    if has_told:
        bold = {"facecolor": blue, **CELL_EDGE}
        found.append(LegendEntry(NUMBER, "bold: a change (95% interval)", bold, "bold", TOLD))
    if NOTHING in cells:
        found.append(LegendEntry(NOTHING, "not measured", MISSING))
    signs = {sign for cell in cells for sign in cell}
    return found + [
        LegendEntry(sign, words, {"facecolor": "white", **CELL_EDGE}, colour=TOLD)
        for sign, words in SIGNS.items()
        if sign in signs
    ]


def _columns(entries: list[LegendEntry], width: float) -> list[list[LegendEntry]]:
    """The entries in as many columns of about one height as a figure of this width has room for."""
    for number in range(len(entries), 1, -1):
        rows = math.ceil(len(entries) / number)
        columns = [entries[first : first + rows] for first in range(0, len(entries), rows)]
        if MARGIN + sum(map(_width, columns)) <= width:
            return columns
    return [entries]


def _width(column: list[LegendEntry]) -> float:
    return SAMPLE + 0.1 + max(text_width(entry.words) for entry in column) + GAP


def legend_size(entries: list[LegendEntry], width: float) -> tuple[float, float]:
    """Inches: the width that a figure needs for the entries, and the height that they take in one of `width`."""
    return MARGIN + _width(entries), BAR + LINE * len(_columns(entries, width)[0]) + MARGIN


def draw_legend(figure: Figure, panel: Axes, entries: list[LegendEntry], top: float) -> None:
    """Below `top`, in inches from the top left as `panel` has them: a colour bar, and the entries in columns."""
    width, height = figure.get_size_inches()
    bar_panel = figure.add_axes((0.5 / width, 1 - (top + 0.2) / height, 2.6 / width, 0.16 / height))
    bar = figure.colorbar(ScalarMappable(cmap=COLOURS), cax=bar_panel, orientation="horizontal")
    bar.set_ticks([0, 0.5, 1], labels=["worse", "no change", "better"])
    bar.ax.tick_params(labelsize=9, length=0)
    words = "against the baseline; full colour as written over a column"
    panel.text(3.5, top + 0.12, words, ha="left", va="center", size=9)
    left = MARGIN
    for column in _columns(entries, width):
        for number, entry in enumerate(column):
            _draw_entry(panel, entry, left, top + BAR + LINE * number)
        left += _width(column)


def _draw_entry(panel: Axes, entry: LegendEntry, left: float, top: float) -> None:
    panel.add_patch(Rectangle((left, top), SAMPLE, 0.8 * LINE, **entry.cell))
    middle = top + 0.4 * LINE
    look: dict[str, Any] = {"va": "center", "zorder": 3}
    text = panel.text(left + SAMPLE / 2, middle, entry.sample, ha="center", size=8, weight=entry.weight, **look)
    text.set_color(entry.colour)
    panel.text(left + SAMPLE + 0.1, middle, entry.words, ha="left", size=9, **look)
