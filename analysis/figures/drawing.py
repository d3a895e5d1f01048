"""What all figures share: how a drawing is handed on, its style, its colours, and how numbers become words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import Formatter, LogFormatter

MARKERS = "osD^vPX*<>"
CROSS: dict[str, Any] = {"marker": "x", "markersize": 7, "markeredgewidth": 1.8}  # what became non-finite
PICTURES = (".png", ".svg", ".pdf")  # kinds of files that are written; others need TeX, or lack transparency


@dataclass(frozen=True)
class Drawing:
    """A figure and a sentence on what it shows; or no figure, and the reason why the sweep has none."""

    figure: Figure | None
    caption: str

    def __post_init__(self) -> None:
        """Have numbers along axes written plainly, and no text of the figure taken for mathematics or for TeX.

        What stands in a figure comes from a store, where a name may be anything.
        """
        if self.figure is None:
            return
        for axis in (axis for panel in self.figure.axes for axis in (panel.xaxis, panel.yaxis)):
            if isinstance(major := axis.get_major_formatter(), LogFormatter):  # it writes powers of ten
                axis.set_major_formatter(_Plain(major))
            if isinstance(minor := axis.get_minor_formatter(), LogFormatter):
                axis.set_minor_formatter(_Plain(minor))
        for text in self.figure.findobj(Text):
            text.set_parse_math(False)


def _plain(x: float) -> str:
    """A number as people write it: 0.001, 30, 200,000, 3 million; a power of ten where that is longer."""
    if 1e4 <= abs(x) < 1e6:
        return f"{x:,.0f}"
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if unit <= abs(x) < 1000 * unit:
            return f"{x / unit:g} {name}"
    return f"{x:g}"


class _Plain(Formatter):
    """The numbers that another formatter would label, as `0.01`, `100,000` and `1e+30`."""

    def __init__(self, chosen: LogFormatter):
        self._chosen = chosen

    def set_axis(self, axis: Any) -> None:
        super().set_axis(axis)
        self._chosen.set_axis(axis)

    def set_locs(self, locs: Any) -> None:
        self._chosen.set_locs(locs)

    def __call__(self, x: float, pos: int | None = None) -> str:
        return _plain(x) if self._chosen(x, pos) else ""


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure, for as long as the block lasts: global settings stay as they were."""
    with matplotlib.rc_context():
        sns.set_theme(context="notebook", style="whitegrid", font_scale=0.9)
        # A name may be anything, and TeX would even run it. `Drawing` has numbers along axes taken for formulas again.
        matplotlib.rcParams |= {"text.parse_math": False, "text.usetex": False}
        yield


@contextmanager
def page(width: float, height: float, title: str = "") -> Iterator[Figure]:
    """An empty figure of this size, in inches, and the `style` to draw it in, for as long as the block lasts."""
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle(title)
        yield figure


def looks(series: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each series; colour-blind readers can tell the colours of at most ten apart."""
    colours = sns.color_palette("colorblind" if len(series) <= 10 else "husl", len(series))
    pairs = zip(series, colours, cycle(MARKERS), strict=False)
    return {name: {"color": colour, "marker": marker} for name, colour, marker in pairs}


def panels_in_grid(figure: Figure, number: int, columns: int, xlabel: str, ylabel: str) -> list[Axes]:
    """Panels with the same axes, whose labels stand at the left, and below the lowest panel of each column."""
    rows = math.ceil(number / columns)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel())
    for index, panel in enumerate(panels):
        is_lowest = index + columns >= number
        panel.set(xlabel=xlabel if is_lowest else "", ylabel="" if index % columns else ylabel)
        panel.tick_params(labelbottom=is_lowest)
    for panel in panels[number:]:
        panel.set_axis_off()
    return panels[:number]
