"""`report OUT`: figures and a page of a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.reading.selection import add_where
from analysis.reports.postmortem import write_worst
from analysis.reports.report import write_report
from harness.basics.printing import say
from harness.config import ConfigError

HELP = "write figures and a page of a sweep, and say what was found"
PURPOSE = (
    "Says what a sweep found, with figures and intervals. Writes OUT/report.html, OUT/trials.html and "
    "OUT/figures; this is the first command to run on results."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    most = "also write the post-mortems of the N trials with the worst incidents"
    parser.add_argument("--postmortems", metavar="N", type=int, default=0, help=most)
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Write OUT/report.html, OUT/trials.html and OUT/figures."""
    if options.postmortems < 0:
        raise ConfigError(f"--postmortems={options.postmortems}: not a number of trials; allowed: 0 or more")
    pages = write_worst(options.out, options.postmortems) if options.postmortems else []
    written = write_report(options.out, options.where)
    pictures = ", ".join(str(path) for path in written.figures) or "none; the report says why"
    say(*(line for page in pages for line in page.words[:1]))
    say(f"{written.about.title}", *written.summary, *(f"Beware: {line}" for line in written.notes))
    say(f"Trials: {written.trials}", f"Report: {written.html}", f"Figures: {pictures}")
    say(f"Next: {written.about.next_command}")
