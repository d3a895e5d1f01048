"""`diff OUT TRIAL TRIAL`: what differs in the configurations of two trials, and in what became of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reports.difference import told_difference
from harness.basics.printing import say

HELP = "say in what two trials differ, side by side"
PURPOSE = "Prints two trials of one sweep side by side: the keys in which they differ, and what became of each."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("one", metavar="TRIAL", help="id of a trial, or how it begins")
    parser.add_argument("other", metavar="TRIAL", help="id of another one; golden: the first one's golden twin")


def run(options: argparse.Namespace) -> None:
    """Print both, side by side."""
    say(*told_difference(options.out, options.one, options.other))
