"""Pictures as files, in the size of the place where they will stand."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis.figures.drawing import PICTURES
from harness.config import ConfigError

IN_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}  # TeX's points are 1/72.27; nobody sees that
LEAST, MOST = 1.0, 40.0  # inches
LARGEST_FONT = 72
_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?(in|cm|mm|pt)?")


def inches(key: str, text: str) -> float:
    """A length such as 3.3in, 84mm or 240pt; a number alone is in inches. Raises ConfigError."""
    found = _LENGTH.fullmatch(text.strip())
    length = float(found[1]) * IN_INCHES[found[2] or "in"] if found else 0.0
    if not LEAST <= length <= MOST:
        allowed = f"{LEAST:g}in to {MOST:g}in, or as many cm, mm or pt"
        raise ConfigError(f"{key}={text:.40}: {'out of range' if found else 'not a length'}; allowed: {allowed}")
    return length


def fit(figure: Figure, width: float | None = None, font: float | None = None, has_title: bool = True) -> None:
    """Give a figure this width in inches, in its own proportions, and its texts this size in points.

    Without a title the one above a single panel goes, too; several panels are told apart by theirs.
    """
    if not has_title:
        figure.suptitle("")
        panels = [panel for panel in figure.axes if panel.get_title()]
        if len(panels) == 1:
            panels[0].set_title("")
    if font is not None:
        for text in figure.findobj(Text):
            text.set_fontsize(font)
    if width is not None:
        before, height = figure.get_size_inches()
        figure.set_size_inches(width, height * width / before)


def check_picture(file: Path) -> None:
    """Raises ConfigError for a name that is no picture's."""
    if file.suffix not in PICTURES:
        raise ConfigError(f"{file}: unknown kind of file; allowed: {', '.join(PICTURES)}")


def save_picture(figure: Figure, file: Path, name: str) -> None:
    """Write a figure of this name; the same results give the same file, byte for byte. Raises OSError."""
    # Every text of an SVG names all fonts of the list, which were a third of a large map.
    fonts = ["DejaVu Sans", "Arial"]
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.sans-serif": fonts}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
