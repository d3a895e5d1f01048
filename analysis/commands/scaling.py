"""`scaling OUT [METRIC]`: how it changes with the size of the model, and what that foretells."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.measures.scaling import METRICS
from analysis.reading.selection import add_where
from analysis.reports.scaling import told_scaling
from harness.basics.printing import say

HELP = "fit a metric against width, depth or parameters"
PURPOSE = (
    "Fits a power law of a metric against width, depth or parameters, with intervals, and says what it gives for "
    "a larger size."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep over sizes")
    names = f"{', '.join(METRICS)} or largest(SIGNAL); default: loss"
    parser.add_argument("metric", metavar="METRIC", nargs="?", default="loss", help=names)
    parser.add_argument(
        "--against", metavar="KEY", default="width", help="width, depth, parameters, ...; default: width"
    )
    parser.add_argument("--to", metavar="SIZE", type=float, action="append", default=[], help="a size to foretell")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw it, too (.svg, .pdf, .png)")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print a table, and draw the laws if that is asked for."""
    how = options.metric, options.against, options.to, options.figure, options.where
    say(*told_scaling(options.out, *how))
