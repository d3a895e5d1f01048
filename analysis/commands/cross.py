"""`cross OUT [TRIAL] [--from OTHER]`: data, or state?"""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reading.selection import add_where
from analysis.reports.crossings import told_cross, told_crossings
from harness.basics.printing import say
from harness.config import ConfigError

HELP = "data or state? feed batches of incidents to another run"
PURPOSE = (
    "Asks whether the data or the state of a run caused an incident: another run of the sweep is fed the same "
    "batches. Prints the losses of both and a verdict."
)
MOST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("trial", metavar="TRIAL", nargs="?", help="id of one, as the dataset has it; default: all")
    parser.add_argument("--from", dest="other", metavar="OTHER", help="id of the one that reads; default: is chosen")
    parser.add_argument("--most", metavar="N", type=int, default=MOST, help=f"of all, so many; default: {MOST}")
    parser.add_argument("--data", metavar="PATH", type=Path, help="where the text lies, if it is not built in")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print the losses of both, and the verdict; of all, a table."""
    if options.trial is None:
        if options.other is not None:
            raise ConfigError(f"--from={options.other}: reads the batches of one trial; allowed: beside TRIAL")
        say(*told_crossings(options.out, options.most, options.data, options.where))
        return
    if options.where:
        raise ConfigError(f"--where {options.where[0]}: chooses among all trials; allowed: without TRIAL")
    say(*told_cross(options.out, options.trial, options.other, options.data))
