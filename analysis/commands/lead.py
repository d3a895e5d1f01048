"""`lead OUT`: early warnings."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reports.leaderboard import told_lead
from harness.basics.printing import say

HELP = "say what leads loss spikes, and warns of divergence"
PURPOSE = "Measures which signals move before the loss does: ahead of loss spikes, and ahead of divergence."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")


def run(options: argparse.Namespace) -> None:
    """Print both tables."""
    say(*told_lead(options.out))
