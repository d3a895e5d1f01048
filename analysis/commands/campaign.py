"""`campaign OUT`: what the faults of a sweep did."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reading.selection import add_where
from analysis.reports.campaign import write_campaign
from analysis.reports.printed import table_lines
from harness.basics.printing import say

HELP = "say what the faults of a sweep did, with figures and a page"
PURPOSE = (
    "Counts what became of the faults of a sweep such as study=campaign (masked, recovered, divergent ...), "
    "by site, bit and size, with figures. Writes OUT/campaign.html."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Write OUT/campaign.html, and print its table."""
    written = write_campaign(options.out, options.where)
    say(*table_lines(written.table))
    say("Shares in percent with 95% Wilson intervals.", *written.meanings)
    say(*(f"Note: {note}" for note in written.notes))
    say(*(f"{picture.name}: {picture.path or picture.caption}" for picture in written.pictures))
    say(f"Trials: {written.trials}", f"Page: {written.html}")
