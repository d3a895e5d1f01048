"""What was found in a sweep, in words: how its trials ended, what mitigations did, and what faults did."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures import metrics
from analysis.measures.quality import are_policies
from analysis.reading.acted import BASELINE, idle_note
from analysis.reading.levels import word
from analysis.reading.loss_words import unit
from analysis.reading.open_sweep import UNFINISHED
from harness.basics.printing import count

MOST_QUALITIES = 4  # that a sentence names
MOST_MITIGATIONS = 3  # with more of them, sentences say what holds for all, and the tables the rest


def outcome_counts(outcomes: np.ndarray) -> dict[str, int]:
    """Outcome -> number of trials, the most frequent first."""
    counts = pd.Series(outcomes, dtype=object).value_counts()
    return {str(name): int(count) for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def findings(ds: xr.Dataset, sensitivity: pd.DataFrame, faults: pd.DataFrame) -> list[str]:
    """A few sentences on a sweep: how its trials ended, what each mitigation did to LR sensitivity, what faults did.

    `sensitivity` is its `metrics.lr_sensitivity`, `faults` its `fault_effects`.
    """
    lines = [
        f"{count(ds.sizes['trial'], 'trial')}: {counted(ds['outcome'])}." if ds.sizes["trial"] else "No trials yet."
    ]
    lines += [note] if (note := idle_note(ds)) else []
    lines += left_out_lines(ds)
    if ds.sizes["trial"]:
        lines += _clean_lines(ds)
        lines += [] if are_policies(ds) else sensitivity_lines(sensitivity)
        lines += fault_lines(faults, unit(ds))
    return lines


def counted(outcomes: xr.DataArray | pd.Series) -> str:
    """Outcomes with the number of their trials, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in outcome_counts(outcomes.to_numpy()).items())


def left_out_lines(ds: xr.Dataset) -> list[str]:
    """What of the user's files no trial has read, a line for each corpus."""
    lines = []
    for corpus in json.loads(ds.attrs["corpus"]):
        if isinstance(left := corpus.get("left_out"), dict):
            what = f"files: {left.get('files')}, bytes: {left.get('bytes')}, the first: {left.get('first')}"
            lines.append(f"Left out of data.path={corpus.get('path')}: {what} ({left.get('why')}).")
    return lines


def _clean_lines(ds: xr.Dataset) -> list[str]:
    """How the trials without a fault ended, for each mitigation, if they did not all end alike."""
    clean = metrics.clean_trials(ds[["fault"]])
    table = pd.DataFrame({name: clean[name].values for name in ("mitigation", "outcome")})
    table = table[table["outcome"] != UNFINISHED]
    if table["outcome"].nunique() < 2:
        return []
    groups = table.groupby("mitigation", sort=True)["outcome"]
    counts = "; ".join(f"{mitigation}: {counted(outcomes)}" for mitigation, outcomes in groups)
    return [f"Without a fault, by mitigation: {counts}."] if len(groups) <= MOST_MITIGATIONS else []


def sensitivity_lines(table: pd.DataFrame) -> list[str]:
    """What mitigations do to LR sensitivity at the largest width."""
    axes = metrics.group_axes(table)
    table = table[table["sensitivity"].notna()]
    if table.empty:
        return ["LR sensitivity needs two learning rates or more, finished without a fault, and validation losses."]
    has_width = table["width"].notna().any()  # attached runs have none
    widest = table[table["width"] == table["width"].max()] if has_width else table
    # In a sweep of several grids some fields have one value among those with a sensitivity.
    others = [axis for axis in axes if axis == "width" or (axis != "mitigation" and widest[axis].nunique(False) > 1)]
    if widest["mitigation"].nunique() > MOST_MITIGATIONS:
        return [_sensitivity_range(widest, others)]
    is_plain = widest["mitigation"] == BASELINE
    pairs = widest[~is_plain].merge(widest[is_plain], on=others, suffixes=("", "_without"))
    pairs = pairs.sort_values("mitigation", kind="stable").drop_duplicates("mitigation")
    if len(pairs):
        return [_comparison(pair["mitigation"], pair, others) for _, pair in pairs.iterrows()]
    if len(widest) > MOST_MITIGATIONS:
        return [_sensitivity_extremes(widest, others)]
    rows = [row for _, row in widest.iterrows()]
    return [f"{row['mitigation']}: LR sensitivity {_place(row, others)} {_value(row)}." for row in rows]


def _sensitivity_range(widest: pd.DataFrame, others: list[str]) -> str:
    """The lowest and the highest of many mitigations, and the recipe without one."""
    rows = widest.sort_values("sensitivity", kind="stable")
    named = {f"lowest with {rows['mitigation'].iloc[0]}": rows.iloc[0]}
    named |= {f"highest with {rows['mitigation'].iloc[-1]}": rows.iloc[-1]}
    plain = rows[rows["mitigation"] == BASELINE]
    named |= {"without any": plain.iloc[0]} if len(plain) else {}
    values = "; ".join(f"{name} {_place(row, others)} {_value(row)}" for name, row in named.items())
    return f"LR sensitivity of {widest['mitigation'].nunique()} mitigations: {values}."


def _sensitivity_extremes(widest: pd.DataFrame, others: list[str]) -> str:
    """The lowest and the highest of many combinations, by what differs between the two, if they can be compared."""
    if len(widest[["lowest_rate", "highest_rate", "rates"]].drop_duplicates()) > 1:
        return f"LR sensitivity of {len(widest)} combinations: their learning rates differ, so they cannot be compared."
    rows = widest.sort_values("sensitivity", kind="stable")
    ends = rows.iloc[[0, -1]]
    differ = [axis for axis in others if axis == "width" or ends[axis].nunique(False) > 1]
    lowest, highest = (f"{_place(row, differ)} {_value(row)}" for _, row in ends.iterrows())
    return f"LR sensitivity of {len(rows)} combinations: lowest {lowest}; highest {highest}."


def _comparison(mitigation: str, pair: pd.Series, others: list[str]) -> str:
    without = pair[["sensitivity_without", "low_without", "high_without"]]
    without.index = ["sensitivity", "low", "high"]
    text = f"{mitigation}: LR sensitivity {_place(pair, others)} {_value(pair)} against {_value(without)} without"
    is_same_range = all(pair[name] == pair[f"{name}_without"] for name in ("lowest_rate", "highest_rate", "rates"))
    if not is_same_range:
        return f"{text}; their learning rates differ, so the two cannot be compared."
    if np.isnan(pair["low"]) or np.isnan(without["low"]):
        return f"{text}; one seed, so no interval."
    is_apart = pair["high"] < without["low"] or pair["low"] > without["high"]
    return f"{text}{'' if is_apart else '; the intervals overlap'}."


def _place(row: pd.Series, axes: list[str]) -> str:
    place = ", ".join(f"{axis} {word(row[axis])}" for axis in axes if axis != "width" or row[axis] == row[axis])
    return f"at {place}" if place else "is"


def _value(row: pd.Series) -> str:
    interval = "" if np.isnan(row["low"]) else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['sensitivity']:.2f}{interval}"


def fault_lines(table: pd.DataFrame, units: str = "nat/token") -> list[str]:
    """A sentence a fault and mitigation, or, if there are many mitigations, a fault; `units` are those of the loss."""
    if table["mitigation"].nunique() <= MOST_MITIGATIONS:
        return [_fault_line(row, f"mitigation {row.mitigation}", units) for row in table.itertuples()]
    lines = []
    for _, group in table.groupby("fault", sort=True):
        total = group.iloc[0].copy()
        for name in ("trials", "strikes", "without_effect", "never_fired", "with_twin", "moved", "lost"):
            total[name] = group[name].sum()
        total["outcomes"] = {UNFINISHED: sum(outcomes.get(UNFINISHED, 0) for outcomes in group["outcomes"])}
        worst = group.sort_values("worst_deviation", kind="stable", na_position="first").iloc[-1]
        total[["worst_deviation", "worst_trial"]] = worst[["worst_deviation", "worst_trial"]]
        lines.append(_fault_line(total, f"{len(group)} mitigations", units))
    return lines


def _fault_line(row: Any, mitigation: str, units: str) -> str:
    moved = f"{row.moved} of {row.with_twin} trials moved away from their golden twin"
    parts = [moved if row.with_twin else "no finished trial with a golden twin, so what it did cannot be told"]
    parts += worst_and_lost(row.worst_deviation, row.lost, row.with_twin, units)
    others = {
        "never fired": row.never_fired,
        "fired without effect": row.without_effect,
        UNFINISHED: row.outcomes.get(UNFINISHED, 0),
    }
    parts += [f"{number} {what}" for what, number in others.items() if number]
    return f"Fault {row.fault}, {mitigation}: {'; '.join(parts)}."


def worst_and_lost(worst: float, lost: int, total: int, units: str = "nat/token") -> list[str]:
    """How far faults moved a loss, in words: `worst` (in `units`) of those that stayed finite, and the `lost` ones."""
    parts = []
    if not np.isnan(worst) and lost < total:
        size = f"{worst:+.2f}" if abs(worst) < 1e6 else f"{worst:+.2g}"
        parts.append(f"the worst{' of those that stayed finite' if lost else ''} by {size} {units}".rstrip())
    if lost:
        parts.append(f"{f'all {lost}' if lost == total > 1 else lost} became non-finite, unlike the twin")
    return parts


def quality_lines(table: pd.DataFrame) -> list[str]:
    """A sentence on where the quality of policies ended, by what was varied; `table` is `final_quality`."""
    known = table[table["quality"].notna()].sort_values("quality", ascending=False, kind="stable")
    if known.empty:
        return ["No policy has ended with a quality."] if len(table) else []
    shown = known if len(known) <= MOST_QUALITIES else known.iloc[[0, -1]]
    values = "; ".join(f"{row.under}: {row.quality:.3g}{_interval(row)}{_lost(row)}" for row in shown.itertuples())
    of = "" if len(known) <= MOST_QUALITIES else f" of {len(known)} combinations, the highest and the lowest"
    return [f"Mean quality at the end{of}: {values}."]


def _interval(row: Any) -> str:
    return "" if np.isnan(row.low) else f" [{row.low:.3g}, {row.high:.3g}]"


def _lost(row: Any) -> str:
    return f" ({row.lost} more became non-finite)" if row.lost else ""
