"""What the commands `leaderboard` and `lead` say of a results folder, in lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.figures.detector_tradeoff import drawn_tradeoff
from analysis.figures.files import check_picture, save_picture
from analysis.measures.conditions import MIXED, TEST, TUNE, kinds, registration
from analysis.measures.conditions import SAID as CONDITIONS
from analysis.measures.detectors import measured, watched
from analysis.measures.early_warning import HORIZON, warning_table
from analysis.measures.known_faults import KnownFaults
from analysis.measures.lead import lead_table, leads
from analysis.measures.leaderboard import by_group, leaderboard
from analysis.reading.open_sweep import open_sweep, open_with_packs
from analysis.reports.printed import table_lines
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
WARNED = (
    ("detector", "warned", "warned_low", "warned_high", "chance", "in_time", "never", "lead", "lead_low", "lead_high"),
    ("detector", "clean_steps", "false_alarms", "false_low", "false_high", "alarmed_runs"),
)
SAID = (
    "Damaging: the final loss moved by more than ten clean envelopes, or not finite. Recall, chance and at_once are "
    "shares of incidents; latency and lead are in steps; false alarms and episodes are per 1,000 clean steps.",
    "Intervals are Wilson's, 95%; of false alarms it takes steps for independent, which those of a run are not: "
    "false_high_runs is the upper end of a bootstrap over whole runs, and episodes count once what comes in a row.",
)


def told_board(
    out: Path, names: Sequence[str], constants: Mapping[str, Mapping[str, Any]], figure: Path | None = None
) -> list[str]:
    """Of each kind of conditions, test first, the leaderboard, and recall by family and by size of damage.

    With `figure` recall against false alarms is drawn into that file, under the first of these conditions. Raises
    ConfigError.
    """
    if figure is not None:
        check_picture(figure)
    whole, packs = open_with_packs(out)
    kind = kinds(whole, packs)
    parts = {name: whole.isel(trial=kind == name) for name in (TEST, MIXED, TUNE) if (kind == name).any()}
    known = {name: faults for name, part in parts.items() if not (faults := KnownFaults.of(part)).table.empty}
    if not known:
        allowed = "one with faults that changed something, finished together with their golden twins"
        raise ConfigError(f"out={out}: a sweep without incidents; allowed: {allowed}")
    names = list(names) or measured(whole)
    lines: list[str] = []
    for name, incidents in known.items():
        part = watched(parts[name], names).load()
        table, seen = leaderboard(part, incidents, names, constants)
        count = f"{len(incidents.table)} incidents, {int(table['damaging'][0])} of them damaging"
        lines += [f"{count}, under {CONDITIONS[name]} (conditions.yaml {registration()})", ""]
        for columns in PARTS:
            lines += [*table_lines(table[list(columns)]), ""]
        for by, text in (("family", "recall of damaging incidents by what was struck"), ("size", "recall by damage")):
            lines += [f"{text}:", *table_lines(by_group(incidents, seen[list(table["detector"])], by)), ""]
        lines += [*(f"Note: {note}" for note in incidents.notes), ""]
        if figure is not None:
            drawing = drawn_tradeoff(part, incidents, names)
            if drawing.figure is None:
                raise ConfigError(f"--figure={figure}: {drawing.caption}")
            save_picture(drawing.figure, figure, "detector_tradeoff")
            lines += [f"Figure: {figure} {drawing.caption}", ""]
            figure = None
    return [*lines, *SAID]


def told_lead(out: Path) -> list[str]:
    """What leads the spikes that faults have the loss make, and what warns of runs that diverge by themselves.

    Raises ConfigError where there is neither.
    """
    sweep = open_sweep(out)
    names = measured(sweep)
    table, warned = lead_table(leads(sweep, names)), warning_table(watched(sweep, names).load(), names, (1.0,))
    if table.empty and warned.empty:
        allowed = "a sweep in which one does, or in which some runs without a fault end badly and some well"
        raise ConfigError(f"out={out}: no fault has the loss spike; allowed: {allowed}")
    lines = []
    if not table.empty:
        lines += [
            *table_lines(table),
            "Shares of the spikes; lead in steps, over those with a sign at or before the spike, with a bootstrap "
            "interval.",
        ]
    if not warned.empty:
        warned = warned.sort_values("warned", ascending=False).drop(columns="factor")
        lines += [""] * bool(lines)
        lines += [f"{warned['lost'].iloc[0]} runs without a fault end badly, {warned['well'].iloc[0]} end well:"]
        for part in WARNED:
            lines += [*table_lines(warned[list(part)]), ""]
        lines += [
            f"Warned: an alarm in the {HORIZON} steps before the loss gives up half of what was learned; chance: so "
            "many would be if alarms were those of runs that end well. Lead: the steps from the first of these alarms, "
            "with a bootstrap interval. False alarms: in 1,000 steps of runs that end well.",
        ]
    return lines
