"""`trial OUT TRIAL`: the page of one trial."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.pages.static_page import write_trial
from harness.basics.printing import say

HELP = "write a trial's page: curves, strikes, incidents, config"
PURPOSE = "Writes the page of one trial: its curves, the strikes of its fault, incidents and configuration."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("trial", metavar="TRIAL", help="id of the trial, as the dataset has it")


def run(options: argparse.Namespace) -> None:
    """Write OUT/trials/TRIAL.html."""
    say(f"Page: {write_trial(options.out, options.trial)}")
