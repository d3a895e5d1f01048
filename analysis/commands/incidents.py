"""`incidents OUT`: every incident of a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.commands._settings import COST, cost_of
from analysis.measures.incidents import LEFT, TYPES, incidents
from analysis.reading.selection import add_where
from analysis.reports.printed import table_lines
from harness.basics.printing import count, say

HELP = "every incident of a sweep: symptoms, alarms, outcome, cost"
PURPOSE = (
    "Lists every incident of a sweep, a row each: when, what was seen, which detectors gave an alarm, what was "
    "done, how it ended and what it cost."
)
NOT_TIMED = "in time and money not known: the time of some step was not measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    add_where(parser)
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=COST)


def run(options: argparse.Namespace) -> None:
    """Print a table, and what all of them cost; all that is known of each is in `analysis.incidents` and its page."""
    cost = cost_of(options.settings)
    table = incidents(options.out, cost.per_hour, options.where)
    if table.empty:
        say("No incident: no symptom, no alarm, and no check that was made failed.")
        return
    seen = table["symptoms"].where(table["symptoms"] != "", table["signs"])
    columns = {"seen": seen, "alarms": table["detectors"].map(_first_alarm)}
    priced = ["money"] if cost.per_hour else []
    shown = table.assign(**columns)[
        ["trial", "first", "last", *columns, "action", "outcome", "steps", "seconds", *priced]
    ]
    say(*table_lines(shown))
    counted = f"{count(len(table), 'incident')} of {count(table['trial'].nunique(), 'trial')}"
    seconds, money = (table[name].sum(skipna=False) for name in ("seconds", "money"))
    price = f", {money:.4g} {cost.currency}".rstrip() if cost.per_hour else ""
    spent = f"{seconds:.3g} s{price}" if seconds == seconds else NOT_TIMED
    say(f"{counted}; cost: {count(table['steps'].sum(), 'step')}, {spent}.")
    if TYPES[2] in table["outcome"].values:
        least = f"{LEFT:g} {table.attrs['loss_unit']}".rstrip()
        say(f"Lingering: more than {least} of the loss, and two standard errors, were left of it.")
    say(f"Next: stability-harness postmortem {options.out} {table['trial'].iloc[0]}")


def _first_alarm(alarms: str) -> str:
    """The first of several, and how many more."""
    first, *others = alarms.split(", ")
    return f"{first} and {len(others)} more" if others else first
