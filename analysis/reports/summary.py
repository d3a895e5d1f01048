"""The results of a sweep in at most five sentences, without names of trials: what stands above its report."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from analysis.figures.mitigation_words import ONE_SEED, STABLE, mitigation_findings, told_share
from analysis.measures import metrics
from analysis.measures.mitigations import Comparison
from analysis.reading.loss_words import unit
from analysis.reports.findings import (
    MOST_MITIGATIONS,
    counted,
    fault_lines,
    quality_lines,
    sensitivity_lines,
    worst_and_lost,
)
from harness.basics.printing import count
from harness.config import NO_FAULT

MOST = 5  # sentences
MOST_FAULTS = 2  # that have one of their own


def summary(
    sweep: xr.Dataset, sensitivity: pd.DataFrame, faults: pd.DataFrame, compared: Comparison, quality: pd.DataFrame
) -> list[str]:
    """The most that can be told, first; what is only counted, last.

    `sensitivity` is the sweep's `metrics.lr_sensitivity`, `faults` its `fault_effects`, `quality` its
    `final_quality`.
    """
    trials = sweep.sizes["trial"]
    if not trials:
        return ["No trials yet."]
    ended = f"{count(trials, 'trial')}: {counted(sweep['outcome'])}."
    moved = mitigation_findings(compared)[:-1]
    rates = [_with_steps(line, sweep) for line in moved if line.startswith(STABLE)]
    others = [line for line in moved if not line.startswith(STABLE)]
    losses = sensitivity_lines(sensitivity) if sensitivity["sensitivity"].notna().any() else []
    struck = fault_lines(faults, unit(sweep))
    of_quality = quality_lines(quality)
    # A sentence for each mitigation, or one for all: never some of them.
    room = min(MOST_FAULTS, MOST - 1 - len(of_quality) - len(rates) - len(others) - len(losses[:1]))
    struck = [_over_mitigations(faults, unit(sweep))] if len(struck) > max(1, room) else struck
    is_single = not compared.table.empty and compared.table["final_loss_seeds"].max() < 2
    share = [line] if (line := told_share(compared) or ONE_SEED * bool(is_single)) else []
    return [ended, *of_quality, *rates, *others, *losses[:1], *struck, *losses[1:2], *share][:MOST]


def _with_steps(line: str, sweep: xr.Dataset) -> str:
    """A sentence on largest stable rates, with how closely the sweep can tell them."""
    rates = np.unique(metrics.clean_trials(sweep[["fault", "lr"]])["lr"].values.astype(float))
    rates = rates[np.isfinite(rates) & (rates > 0)]
    if len(rates) < 2:
        return line
    steps = sorted({f"{ratio:.2g}" for ratio in rates[1:] / rates[:-1]}, key=float)
    apart = steps[0] if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    return f"{line} Neighbouring rates of the sweep are a factor of {apart} apart."


def _over_mitigations(faults: pd.DataFrame, units: str) -> str:
    """One sentence on all faults."""
    parts = []
    for fault, rows in faults.groupby("fault", sort=True):
        assert fault != NO_FAULT.name
        lost, total = int(rows["lost"].sum()), int(rows["with_twin"].sum())
        part = f"{fault} moved {int(rows['moved'].sum())} of {total} trials"
        details = worst_and_lost(rows["worst_deviation"].max(), lost, total, units)
        details += [f"{idle} never fired"] if (idle := int(rows["never_fired"].sum())) else []
        parts.append(part + (f" ({', '.join(details)})" if details else ""))
    more = len(parts) - 3
    named = "; ".join(parts[:3]) + (f"; {more} more faults" if more > 0 else "")
    mitigations = faults["mitigation"].unique()
    of = f"mitigations {', '.join(map(str, mitigations))}" if len(mitigations) <= MOST_MITIGATIONS else ""
    of = of or f"{len(mitigations)} mitigations"
    over = f", over {of}" if len(mitigations) > 1 else ""
    return f"Away from their golden twins{over}: {named}."
