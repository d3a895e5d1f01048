"""`detectors OUT [NAME or KEY=VALUE ...]`: how well each does on stored runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from analysis.commands._settings import CHOSEN, chosen_detectors
from analysis.measures.detectors import measured
from analysis.measures.leaderboard import scored
from analysis.reading.open_sweep import open_sweep
from analysis.reading.selection import add_where, with_company
from analysis.reports.printed import table_lines
from harness.basics.printing import say

HELP = "say how well detectors do on stored runs, with any constants"
PURPOSE = (
    "Runs detectors over the stored signals of a sweep, with any constants, and prints for each how many "
    "incidents it finds, how late, and how many false alarms it gives. Nothing is trained."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("out", metavar="OUT", type=Path, help="results folder of a sweep")
    parser.add_argument("chosen", metavar="NAME or KEY=VALUE", nargs="*", help=CHOSEN)
    add_where(parser)


def run(options: argparse.Namespace) -> None:
    """Print a table, a row each."""
    names, constants = chosen_detectors(options.chosen)
    sweep = with_company(open_sweep(options.out), options.where)
    table = scored(sweep, names or measured(sweep), constants)
    shown = table[["detector", "incidents", "clean_steps"]].assign(
        recall=[_range(*row) for row in table[["recall", "recall_low", "recall_high"]].to_numpy()],
        latency=table["latency"],
        latency_95=table["latency_95"],
        false_alarms=[
            _range(*row) for row in table[[f"false_alarms{end}" for end in ("", "_low", "_high")]].to_numpy()
        ],
    )
    say(*table_lines(shown))
    say("Recall in shares of incidents, latency in steps, false alarms per 1,000 clean steps; 95% Wilson intervals.")


def _range(value: float, low: float, high: float) -> str:
    return f"{value:.3g} [{low:.2g}, {high:.3g}]" if value == value else "-"
