"""Pictures as files."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from analysis.figures.drawing import PICTURES
from harness.config import ConfigError


def check_picture(file: Path) -> None:
    """Raises ConfigError for a name that is no picture's."""
    if file.suffix not in PICTURES:
        raise ConfigError(f"{file}: unknown kind of file; allowed: {', '.join(PICTURES)}")


def save_picture(figure: Figure, file: Path, name: str) -> None:
    """Write a figure of this name; the same results give the same file, byte for byte. Raises OSError."""
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
