"""`figure NAME OUT FILE`: one figure."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.figures.files import check_picture, save_picture
from analysis.figures.registry import Needs, Results, figures
from analysis.reading.acted import idle_note
from analysis.reading.selection import add_where
from harness.basics.printing import complain, say
from harness.config import ConfigError

HELP = "write one figure of a sweep to a file (.svg, .pdf, .png)"


def figure_names() -> list[str]:
    """Every figure that `figure NAME` draws."""
    return [*figures(*Needs)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("name", metavar="NAME", choices=figure_names(), help=", ".join(figure_names()))
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("file", metavar="FILE", type=Path)
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Draw it, and print its caption."""
    results, figure = Results.open(options.out, options.where), figures(*Needs)[options.name]
    drawing = figure(results)
    if drawing.figure is None:
        raise ConfigError(f"figure {options.name}: {drawing.caption}")
    check_picture(options.file)
    if figure.needs == Needs.OUTCOMES:
        complain(*(f"note: {note}" for note in results.notes))
    save_picture(drawing.figure, options.file, options.name)
    mark = "" if figure.needs == Needs.SEARCHES else idle_note(results.sweep)
    say(f"Figure: {options.file}", " ".join(filter(None, (drawing.caption, mark))))
