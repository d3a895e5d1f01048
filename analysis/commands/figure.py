"""`figure NAME OUT FILE`: one figure."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.figures.files import LARGEST_FONT, check_picture, fit, inches, save_picture
from analysis.figures.registry import Needs, Results, figures
from analysis.reading.acted import idle_note
from analysis.reading.selection import add_where
from harness.basics.printing import complain, say
from harness.config import ConfigError

RENAMED = {"stability_edge": "largest_stable_rate"}
HELP = "write one figure of a sweep to a file (.svg, .pdf, .png)"
PURPOSE = "Draws one figure of a sweep into a file and prints its caption."


def figure_names() -> list[str]:
    """Every figure that `figure NAME` draws."""
    return [*figures(*Needs)]


def _named(name: str) -> str:
    """The name of a figure; of one that was renamed the new one, which is said."""
    if name in RENAMED:
        complain(f"note: the figure {name} is called {RENAMED[name]} now; the old name goes with version 0.3")
    return RENAMED.get(name, name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    known = ", ".join(figure_names())
    parser.add_argument("name", metavar="NAME", type=_named, choices=figure_names(), help=known)
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("file", metavar="FILE", type=Path)
    add_where(parser)
    parser.add_argument("--width", metavar="LENGTH", help="of the whole figure, such as 3.3in, 84mm or 240pt")
    parser.add_argument("--font", metavar="POINTS", type=float, help="size of every text")
    parser.add_argument("--no-title", action="store_true", help="for where a caption stands below")


def run(options: argparse.Namespace) -> None:
    """Draw it, and print its caption."""
    results, figure = Results.open(options.out, options.where), figures(*Needs)[options.name]
    width = None if options.width is None else inches("--width", options.width)
    if options.font is not None and not 1 <= options.font <= LARGEST_FONT:
        raise ConfigError(f"--font={options.font:g}: out of range; allowed: 1 to {LARGEST_FONT} points")
    drawing = figure(results)
    if drawing.figure is None:
        raise ConfigError(f"figure {options.name}: {drawing.caption}")
    check_picture(options.file)
    if figure.needs == Needs.OUTCOMES:
        complain(*(f"note: {note}" for note in results.notes))
    fit(drawing.figure, width, options.font, has_title=not options.no_title)
    save_picture(drawing.figure, options.file, options.name)
    mark = "" if figure.needs == Needs.SEARCHES else idle_note(results.sweep)
    say(f"Figure: {options.file}", " ".join(filter(None, (drawing.caption, mark))))
