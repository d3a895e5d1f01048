"""`detectors OUT [NAME or KEY=VALUE ...]`: how well each does on stored runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.commands._settings import CHOSEN, chosen_detectors
from analysis.measures.detectors import measured
from analysis.measures.leaderboard import scored
from analysis.reading.open_sweep import open_sweep
from analysis.reading.selection import add_where, with_company
from harness.basics.printing import say

HELP = "say how well detectors do on stored runs, with any constants"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("chosen", metavar="NAME or KEY=VALUE", nargs="*", help=CHOSEN)
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print a table, a row each."""
    names, constants = chosen_detectors(options.chosen)
    sweep = with_company(open_sweep(options.out), options.where)
    table = scored(sweep, names or measured(sweep), constants)
    say(*table.to_string(index=False, float_format="{:.3g}".format, na_rep="-").split("\n"))
    say("Recall in shares of incidents, latency in steps, false alarms per 1,000 clean steps; 95% Wilson intervals.")
