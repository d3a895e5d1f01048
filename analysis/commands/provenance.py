"""`provenance OUT [TRIAL]`: first non-finite values."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from analysis.measures.provenance import named, provenance
from analysis.reading.open_sweep import open_sweep
from analysis.reading.selection import add_where, with_company
from analysis.reports.printed import table_lines
from harness.basics.printing import say
from harness.config import ConfigError

HELP = "say where first non-finite values came from"
PURPOSE = "Says where the first non-finite value of each trial came from: step, tensor, operation and cause."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("trial", metavar="TRIAL", nargs="?", help="the id of one trial, or how it begins")
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print the record of a trial, or a table of all."""
    sweep = with_company(open_sweep(options.out), options.where)
    table = provenance(sweep)
    if options.trial is not None:
        found = table[table["trial"].str.startswith(options.trial)]
        if len(found) != 1:
            why = f"begins the ids of {len(found)} trials" if len(found) else "no trial that was not finite"
            allowed = ", ".join(table["trial"]) or "none, because all were finite"
            raise ConfigError(f"TRIAL={options.trial}: {why} in out={options.out}; allowed: {allowed}")
        say(*(f"{name:<16}{value}" for name, value in found.iloc[0].items() if not pd.isna(value) and value != ""))
        return
    if table.empty:
        say("Every trial was finite.")
        return
    shown = ["trial", "fault", "step", "direction", "site", "tensor", "head", "index", "value", "cause", "format"]
    words = table[[*shown, "blamed", "blamed_index", "evidence"]].astype(object)
    say(*table_lines(words.where(words.notna(), "")))
    say("How often the blamed tensor is the struck one, in shares with 95% Wilson intervals:")
    say(*table_lines(named(sweep)))
