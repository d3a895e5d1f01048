"""What all figures share: how a drawing is handed on, its style, its colours, and how numbers become words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.figure import Figure

MARKERS = "osD^vPX*<>"


@dataclass(frozen=True)
class Drawing:
    """A figure and a sentence on what it shows; or no figure, and the reason why the sweep has none."""

    figure: Figure | None
    caption: str


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure, for as long as the block lasts: global settings stay as they were."""
    with matplotlib.rc_context():
        sns.set_theme(context="notebook", style="whitegrid", font_scale=0.9)
        yield


def palette(series: Sequence[str]) -> dict[str, Any]:
    """A colour for each of the series, which colour-blind readers can tell apart if there are at most ten."""
    return dict(zip(series, sns.color_palette("colorblind" if len(series) <= 10 else "husl", len(series)), strict=True))


def short(value: Any) -> str:
    """A value of the config as a label."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def count(number: int, noun: str) -> str:
    """`1 trial`, `2 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
