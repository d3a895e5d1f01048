"""`incidents OUT`: every incident of a sweep."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.commands._settings import COST, cost_of
from analysis.measures.incidents import incidents
from analysis.reading.selection import add_where
from harness.basics.printing import count, say

HELP = "every incident of a sweep: symptoms, alarms, outcome, cost"
NOT_TIMED = "in time and money not known: the time of some step was not measured"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    add_where(parser)
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=COST)


def run(options: argparse.Namespace) -> None:
    """Print a table, and what all of them cost."""
    cost = cost_of(options.settings)
    table = incidents(options.out, cost.per_hour, options.where)
    if table.empty:
        say("No incident: no symptom, no alarm, and every consistency check holds.")
        return
    shown = table.drop(columns=["loss_before", "loss_after", "tokens"])
    say(*shown.to_string(index=False, float_format="{:.3g}".format, na_rep="-").split("\n"))
    counted = f"{count(len(table), 'incident')} of {count(table['trial'].nunique(), 'trial')}"
    seconds, money = (table[name].sum(skipna=False) for name in ("seconds", "money"))
    spent = f"{seconds:.3g} s, {money:.4g} {cost.currency}".rstrip() if seconds == seconds else NOT_TIMED
    say(f"{counted}; cost: {count(table['steps'].sum(), 'step')}, {spent}.")
