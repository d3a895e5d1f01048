"""`postmortem OUT TRIAL`: the page on a trial's incident."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.commands._settings import COST, cost_of
from analysis.reports.postmortem import write_postmortem
from harness.basics.printing import say

HELP = "write the post-mortem of a trial's incident"
PURPOSE = (
    "Writes the page on one trial's incident: what was seen, the likely cause with its evidence, what was done "
    "and what it cost. `incidents OUT` names the trials."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("trial", metavar="TRIAL", help="id of the trial, as the dataset has it")
    parser.add_argument("--data", metavar="PATH", type=Path, help="where the text lies, if it is not built in")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=COST)


def run(options: argparse.Namespace) -> None:
    """Write it, and print its words."""
    cost = cost_of(options.settings)
    written = write_postmortem(options.out, options.trial, cost.per_hour, cost.currency, options.data)
    say(*written.words, f"Page: {written.html}", f"Markdown: {written.markdown}")
