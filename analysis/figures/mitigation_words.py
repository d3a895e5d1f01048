"""A comparison of mitigations in words: what stands in a cell, the table of the report, and a few sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.measures.mitigations import Comparison, Metric
from analysis.reading.acted import BASELINE, MARK
from analysis.reading.levels import word
from harness.basics.printing import count

BOUNDS = {">=": "≥", "<": "<", "~": "≈", "": ""}
DIGITS = {"final_loss": 3, "common_loss": 3, "sensitivity": 2, "uncapped": 2}
DIGITS |= {"deviation": 2, "recovery": 0, "step_time": 2}
MOST_NAMED = 3  # mitigations in a sentence
NOTHING = "–"
TIME = "step_time"
STABLE = "Largest stable learning rate"
ONE_SEED = "One seed, so there are no intervals, and no difference can be told."


@dataclass(frozen=True)
class Cell:
    """What the report's table has in a cell: a value with its interval, the change with its own, and what it means."""

    value: str
    change: str = ""
    verdict: str = ""  # "better" or "worse", if the interval leaves out "no change"


def value_words(row: pd.Series, name: str) -> str:
    """The value of a metric in a row of `Comparison.table`: a number with its bound, ∞, "> 50" steps, or a dash.

    Behind it a † where the mitigation did not act as named in the trials that the value is taken from.
    """
    value = row[name]
    if np.isnan(value) or (name == TIME and not is_timed(row)):
        return NOTHING
    mark = MARK.strip() if row[f"{name}_idle"] else ""
    if name.startswith("recovery") and np.isinf(value):
        return f">{row['watched']:.0f}{mark}"
    return BOUNDS[row.get(f"{name}_bound", "")] + _number(value, name) + mark


def is_timed(row: pd.Series) -> bool:
    """Whether several packs were timed, of the baseline and of the mitigation; the baseline's own time is 1."""
    return row["mitigation"] == BASELINE or not np.isnan(row[f"{TIME}_low"])


def _number(value: float, name: str) -> str:
    if np.isinf(value):
        return "∞" if value > 0 else "-∞"
    if name == "stable_rate" or abs(value) >= 1000:
        return _two_digits(value)
    # Recovery times are whole steps, but the median of two may lie between them.
    digits = DIGITS[name.split(".")[0]] + (name.startswith("recovery") and not float(value).is_integer())
    is_tiny = 0 < abs(value) < 0.5 * 10**-digits
    return f"{value:.0e}" if is_tiny else f"{value:.{digits}f}"


def _two_digits(value: float) -> str:
    """To two digits, and with an exponent only where that is shorter."""
    return f"{float(f'{value:.2g}'):g}"


def _interval(row: pd.Series, name: str, of: str) -> str:
    low, high = row[f"{of}_low"], row[f"{of}_high"]
    return "" if np.isnan(low) else f" [{_number(low, name)}, {_number(high, name)}]"


def _change(row: pd.Series, name: str, metric: Metric) -> str:
    change = row[f"{name}_change"]
    if np.isnan(change):
        return ""
    shown = f"x{_two_digits(change)}" if metric.is_ratio else ("+" if change > 0 else "") + _number(change, name)
    return shown + _interval(row, name, f"{name}_change")


def _cell(row: pd.Series, name: str, metric: Metric, is_told: bool, gain: float) -> Cell:
    value = value_words(row, name)
    if value != NOTHING:
        value += _interval(row, name, name)
    if name == "final_loss" and not np.isnan(row["best_rate"]):
        value += f" at {word(row['best_rate'])}"
    fault = name.partition(".")[2]
    if name.startswith("recovery.") and row[f"recovered.{fault}_trials"]:
        share = [round(100 * row[f"recovered.{fault}{end}"]) for end in ("", "_low", "_high")]
        value += f"; back: {share[0]}% [{share[1]}, {share[2]}] of {row[f'recovered.{fault}_trials']}"
    change = "" if name == TIME else _change(row, name, metric)
    verdict = ("better" if gain > 0 else "worse") if is_told else ""
    return Cell(value, change, verdict)


def table_rows(comparison: Comparison) -> dict[str, list[Any]]:
    """Heading and rows for the page: `names`, the axes as text, and `cells`, a `Cell` a metric."""
    metrics = comparison.metrics
    told = {name: comparison.is_told(name) for name in metrics}
    gains = {name: comparison.gain(name) for name in metrics}
    heading = [*comparison.axes, *(f"{m.label} [{m.units}]" if m.units else m.label for m in metrics.values())]
    rows = []
    for index, row in comparison.table.iterrows():
        names = [word(row[axis]) for axis in comparison.axes]
        cells = [_cell(row, name, metric, told[name][index], gains[name][index]) for name, metric in metrics.items()]
        rows.append({"names": names, "cells": cells})
    return {"heading": heading, "rows": rows}


# --- sentences ---------------------------------------------------------------------------------------------------


def mitigation_findings(comparison: Comparison) -> list[str]:
    """Which mitigations moved the largest stable rate and the worst deviation at the largest width; how sure it is."""
    if comparison.table.empty:
        return []
    widest = comparison.table[comparison.place == comparison.place.max()]
    place = ", ".join(f"{axis} {word(widest[axis].iloc[0])}" for axis in comparison.axes[1:])
    is_baseline = widest["mitigation"] == BASELINE
    titles = {"stable_rate": STABLE, "deviation": "Worst deviation over the faults"}
    lines = [
        f"{title} at {place}: {_moved(comparison, metric, widest[~is_baseline])}."
        for metric, title in titles.items()
        if metric in comparison.metrics
    ]
    if "stable_rate" in comparison.metrics and (widest.loc[is_baseline, "stable_rate_bound"] == ">=").any():
        lines[0] += (
            " The baseline trained at every rate of the sweep with some seed, so only larger rates would show more."
        )
    return [*lines, " ".join(filter(None, [told_share(comparison), coverage(comparison)]))]


def told_share(comparison: Comparison) -> str:
    """How many changes can be told; "" where none could be."""
    if comparison.table.empty:
        return ""
    told = sum(int(comparison.is_told(name).sum()) for name in comparison.metrics)
    total = sum(int(comparison.table[f"{name}_change_low"].notna().sum()) for name in comparison.metrics)
    if not total:
        return ""
    verb = "shows" if told == 1 else "show"
    said = f"{told} of {count(total, 'comparison')} with the baseline {verb} a change (95% interval)"
    return f"{said}{_which(comparison)}."


def _which(comparison: Comparison) -> str:
    """In what the first mitigations differ from the baseline, as far as it can be told."""
    found: dict[str, list[str]] = {}
    for name, metric in comparison.metrics.items():
        for _, row in comparison.table[comparison.is_told(name)].iterrows():
            place = ", ".join(f"{axis} {word(row[axis])}" for axis in comparison.axes[1:])
            found.setdefault(f"{row['mitigation']} at {place}", []).append(metric.label)
    told = [f"{who} ({'; '.join(_first(labels))})" for who, labels in found.items()]
    return f": {', '.join(_first(told))}" if told else ""


def _first(words: list[str]) -> list[str]:
    more = len(words) - MOST_NAMED
    return [*words[:MOST_NAMED], f"{more} more"] if more > 0 else words


def _moved(comparison: Comparison, metric: str, rows: pd.DataFrame) -> str:
    """The mitigations of `rows` whose change can be told, the largest first; of a higher rate with its price."""
    if not rows[f"{metric}_change_low"].notna().any():
        is_one = rows[f"{metric}_seeds"].max() == 1
        return "nothing can be told " + ("from one seed" if is_one else "from these trials")
    told, gain = comparison.is_told(metric)[rows.index], comparison.gain(metric)[rows.index]
    verbs = ("lowered", "raised") if comparison.metrics[metric].less_is_better else ("raised", "lowered")
    parts = []
    for verb, size in zip(verbs, (gain, -gain), strict=True):
        order = size[told & (size > 0)].sort_values(ascending=False, kind="stable").index
        if len(order):
            has_price = metric == "stable_rate" and size is gain
            named = [_named(comparison, metric, rows.loc[index], has_price) for index in order[:MOST_NAMED]]
            named += [f"{len(order) - MOST_NAMED} more"] if len(order) > MOST_NAMED else []
            parts.append(f"{verb} by {'; '.join(named)}")
    if not parts:
        these = rows["mitigation"].iloc[0] if len(rows) == 1 else f"any of {count(len(rows), 'mitigation')}"
        return f"no difference to the baseline can be told for {these}"
    rest = int((~told).sum())
    parts += [f"no difference can be told for {count(rest, 'other')}"] if rest else []
    return ". ".join([parts[0], *(part[0].upper() + part[1:] for part in parts[1:])])


def _named(comparison: Comparison, metric: str, row: pd.Series, has_price: bool) -> str:
    """A mitigation with its change, and what it costs."""
    change = f"{row['mitigation']} {_change(row, metric, comparison.metrics[metric])}"
    prices = [f"final loss {_change(row, 'final_loss', comparison.metrics['final_loss'])}"] if has_price else []
    if has_price and TIME in comparison.metrics and is_timed(row):
        prices.append(f"step time x{value_words(row, TIME)}{_interval(row, TIME, TIME)}")
    return f"{change} ({', '.join(prices)})" if prices else change


def coverage(comparison: Comparison) -> str:
    """What 95% intervals over so few seeds say, and what they do not, and what a † is; "" without a comparison."""
    if comparison.table.empty:
        return ""
    seeds = int(comparison.table["final_loss_seeds"].max())
    mark = f" {MARK.strip()} behind a number: the mitigation did not act as named in the trials that it is taken from."
    if not any(comparison.table[f"{name}_idle"].any() for name in comparison.metrics):
        mark = ""
    if seeds < 2:
        return ONE_SEED + mark
    often = {2: "half", 3: "a quarter"}
    missing = f"; with {seeds} seeds these miss the true value {often[seeds]} of the time" if seeds in often else ""
    return (
        f"Intervals are 95%. Those of means are Student's t over {seeds} seeds and the held-out text. Those of "
        "medians, and of means with an infinite loss among them, are bootstraps over seeds"
        f"{missing}. Some intervals show a change by chance, and all comparisons share the baseline's runs: look for "
        f"what agrees across widths.{mark}"
    )
