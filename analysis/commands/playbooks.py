"""`playbooks OUT`: playbooks on the same incidents."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reading.selection import add_where
from analysis.reports.playbooks import told_playbooks
from harness.basics.printing import say

HELP = "say what each playbook saves of the same incidents"
PURPOSE = (
    "Compares playbooks (what is done at an alarm) on the same incidents: how many runs each saves, and at what cost."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("--per-hour", metavar="MONEY", type=float, help="what an hour of one trial costs")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    say(*told_playbooks(options.out, options.per_hour, options.where))
