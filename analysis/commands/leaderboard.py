"""`leaderboard OUT [NAME or KEY=VALUE ...]`: detectors on the same incidents."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.commands._settings import CHOSEN, chosen_detectors
from analysis.reports.leaderboard import told_board
from harness.basics.printing import say

HELP = "put detectors on the same incidents and clean runs"
PURPOSE = "Ranks detectors on the same incidents and the same clean runs of a sweep such as study=detectors."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="draw recall against false alarms, too")
    parser.add_argument("chosen", metavar="NAME or KEY=VALUE", nargs="*", help=CHOSEN)


def run(options: argparse.Namespace) -> None:
    """Print the board, and draw it if that is asked for."""
    say(*told_board(options.out, *chosen_detectors(options.chosen), options.figure))
