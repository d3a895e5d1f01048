"""`margins OUT`: how often a recipe fails without one of its parts, and without two."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.measures.margins import WORSE
from analysis.reading.selection import add_where
from analysis.reports.margins import told_margins
from harness.basics.printing import say

HELP = "say what parts of a recipe are worth, alone and in pairs"
PURPOSE = (
    "Measures what each part of a recipe is worth: how often runs of a sweep such as study=margins fail without "
    "it, and without it and another one."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a study such as margins")
    parser.add_argument(
        "--worse",
        metavar="NAT",
        type=float,
        default=WORSE,
        help=f"nat/token above the whole recipe from which a run has failed; default: {WORSE}",
    )
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw the map of all pairs, too")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print the tables, and draw the map if that is asked for."""
    say(*told_margins(options.out, options.worse, options.figure, options.where))
