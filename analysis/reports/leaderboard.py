"""What the commands `leaderboard` and `lead` say of a results folder, in lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.measures.detectors import measured, watched
from analysis.measures.known_faults import KnownFaults
from analysis.measures.lead import lead_table, leads
from analysis.measures.leaderboard import by_group, leaderboard
from analysis.reading.open_sweep import open_sweep
from harness.config import ConfigError

PARTS = (
    (
        "detector",
        "recall_damaging",
        "recall_low",
        "recall_high",
        "chance",
        "recall",
        "at_once",
        "latency",
        "latency_95",
    ),
    ("detector", "clean_runs", "clean_steps", "false_alarms", "false_low", "false_high", "false_high_runs", "episodes"),
    ("detector", "alarmed_runs", "latency_lost", "lead", "leads", "microseconds"),
)
SAID = (
    "Damaging: the final loss moved by more than ten clean envelopes, or not finite. Recall, chance and at_once are "
    "shares of incidents; latency and lead are in steps; false alarms and episodes are per 1,000 clean steps.",
    "Intervals are Wilson's, 95%; of false alarms it takes steps for independent, which those of a run are not: "
    "false_high_runs is the upper end of a bootstrap over whole runs, and episodes count once what comes in a row.",
)


def told_board(out: Path, names: Sequence[str], constants: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The leaderboard and the recall by family and by size of damage. Raises ConfigError."""
    sweep = open_sweep(out)
    incidents = KnownFaults.of(sweep)
    if incidents.table.empty:
        allowed = "one with faults that changed something, finished together with their golden twins"
        raise ConfigError(f"out={out}: a sweep without incidents; allowed: {allowed}")
    names = list(names) or measured(sweep)
    table, seen = leaderboard(watched(sweep, names).load(), incidents, names, constants)
    lines = [f"{len(incidents.table)} incidents, {int(table['damaging'][0])} of them damaging", ""]
    for part in PARTS:
        lines += [*_lines(table[list(part)]), ""]
    for by, text in (("family", "recall of damaging incidents by what was struck"), ("size", "recall by damage")):
        lines += [f"{text}:", *_lines(by_group(incidents, seen[list(table["detector"])], by)), ""]
    return [*lines, *SAID, *(f"Note: {note}" for note in incidents.notes)]


def told_lead(out: Path) -> list[str]:
    """What leads the spikes of the loss. Raises ConfigError."""
    sweep = open_sweep(out)
    table = lead_table(leads(sweep, measured(sweep)))
    if table.empty:
        raise ConfigError(f"out={out}: no fault has the loss spike; allowed: a sweep in which one does")
    said = (
        "Shares of the spikes; lead in steps, over those with a sign at or before the spike, with a bootstrap interval."
    )
    return [*_lines(table), said]


def _lines(table: pd.DataFrame) -> list[str]:
    return table.to_string(index=False, float_format="{:.3g}".format, na_rep="-").split("\n")
