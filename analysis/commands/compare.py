"""`compare OUT OUT`: two results folders, trial by trial."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reports.folders import told_comparison
from harness.basics.printing import say

HELP = "pair the trials of two sweeps, and say what changed"
PURPOSE = (
    "Pairs the trials of two sweeps that have the same configuration but for what differs between the folders, "
    "and prints how their losses and outcomes differ."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("one", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("other", metavar="OUT", type=Path, help="another one, with the same grid, seeds and data")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw the changes, too (.svg, .pdf, .png)")


def run(options: argparse.Namespace) -> None:
    """Print the table, and draw it if that is asked for."""
    say(*told_comparison(options.one, options.other, options.figure))
