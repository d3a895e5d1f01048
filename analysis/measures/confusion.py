"""How often the inferred cause of an incident is the true one, which a fault's record has: over many, as a matrix.

Counted are faulty trials whose damage can be seen: their loss, their gradient norm or their finiteness left the range
of the golden twin (`visibility`, `analysis.measures.outcomes`). One in which no incident is found counts as
`NOT_SEEN`.

The true cause is where the fault struck. What is wrong with one step's computation, forwards or backwards, reaches the
weights through its gradient alone, so it is a corrupted gradient; so is a first moment, which is a mean of gradients.
What rounds, overflows or scales the loss is a matter of number formats, wherever it does so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.again.batches import BatchReader
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.anomalies import TrialSignals
from analysis.measures.causes import (
    CAUSES,
    FORMAT,
    GRADIENT,
    RARE,
    RATE,
    REPETITION,
    STALE,
    UNKNOWN,
    WEIGHT,
    Finding,
    cause_of,
)
from analysis.measures.evidence import Evidence, evidence_of, provenance_of
from analysis.measures.incidents import TYPES, Incident, of_one, runs, worst
from analysis.measures.outcomes import VISIBLE, outcomes_and_notes
from analysis.measures.statistics import studied, wilson_interval
from analysis.reading.twins import values_of
from harness.config import ConfigError

NOT_SEEN = "no incident found"
OF_NAME = {
    "fp16_overflow": FORMAT,
    "fp16_underflow": FORMAT,
    "fp8_gradients": FORMAT,
    "bf16_scores": FORMAT,
    "loss_scale_jump": FORMAT,
}
OF_KIND = {
    "rare_tokens": RARE,
    "random_tokens": RARE,
    "repetition": REPETITION,
    "duplicated_batch": REPETITION,
    "long_document": UNKNOWN,  # text as it is
    "schedule_offset": RATE,
    "warmup_skipped": RATE,
    "stale_gradient": GRADIENT,
    "dropped_rank": GRADIENT,
    "reduction": FORMAT,
    "missed_update": WEIGHT,  # which is not what it should be
    **dict.fromkeys(("wrong_expert", "swapped_experts", "one_expert", "lost_expert"), UNKNOWN),
    **dict.fromkeys(("bypassed_expert", "late_routing"), UNKNOWN),
    **dict.fromkeys(("late_reward", "shifted_advantage"), UNKNOWN),
}
OF_SITE = {
    "weight": WEIGHT,
    "update": WEIGHT,
    "moment_1": GRADIENT,
    "moment_2": STALE,
    "gradient": GRADIENT,
    "reduced_gradient": GRADIENT,
    "clipped_gradient": GRADIENT,
    "activation": GRADIENT,
    "activation_gradient": GRADIENT,
    "learning_rate": RATE,
    "loss_scale": FORMAT,
    **dict.fromkeys(("buffer", "sampler_weight", "reward", "advantage"), UNKNOWN),
}


def true_cause(name: str, kind: str, site: str) -> str | None:
    """Of a fault by its name, its kind and the site that it struck; None where nothing is known of such a fault."""
    return OF_NAME.get(name) or OF_KIND.get(kind) or OF_SITE.get(site)


@dataclass(frozen=True)
class Diagnosis:
    """An incident, what speaks for its cause, and the cause."""

    incident: Incident
    evidence: Evidence
    finding: Finding


@dataclass(frozen=True)
class Confusion:
    """`trials` has a row for each fault with visible damage, `matrix` counts true causes (rows) and inferred ones."""

    trials: pd.DataFrame
    matrix: pd.DataFrame
    types: pd.DataFrame
    left_out: int  # faults with visible damage for which no cause is defined

    def right(self, is_sure: bool = False) -> tuple[int, int, float, float]:
        """How many of how many, and the 95% Wilson interval of that share; `is_sure`: where a sign is sure alone."""
        of = self.trials[self.trials["is_sure"]] if is_sure else self.trials
        right, total = int((of["true"] == of["inferred"]).sum()), len(of)
        low, high = wilson_interval(right, total)
        return right, total, float(low), float(high)


def diagnosed(
    run: TrialSignals, incident: Incident, reading: BatchReader | None, provenance: Mapping[str, str] | None = None
) -> Diagnosis:
    """What an incident was, told from its evidence alone; `provenance` is what `provenance_of` has found."""
    evidence = evidence_of(run, incident, reading, provenance)
    return Diagnosis(incident, evidence, cause_of(evidence))


def confusion(out: Path | str, data: Path | None = None) -> Confusion:
    """The inferred against the true cause of every fault with visible damage, of the results in `out`.

    Args:
        out: A results folder.
        data: Where the text lies, if it is not built in.

    Returns:
        `trials` with the columns trial, fault, site, `true`, `inferred`, `reason`, `type` (1 to 3), `deviation_max`
        (nat/token), and `is_sure`: the incident has a sign that healthy runs hardly ever have. The others are found
        because they are asked for by name: the oddest step, which need not be the fault's. `types` has the shares of
        recoverable, lingering and divergent among them, with 95% Wilson intervals.

    Raises:
        ConfigError: The folder has no such trials, or no fault of which the true cause is defined; or as
            `analysis.again.batches.reading_of`.
    """
    folder = SweepFolder.open(out)
    judged, _ = outcomes_and_notes(folder.sweep)
    seen = visible(judged)
    if not seen.sizes["trial"]:
        allowed = "a folder with finished faults that show in the loss or in the gradient norm, and their golden twins"
        raise ConfigError(f"out={out}: has no fault whose damage can be seen; allowed: {allowed}")
    readings = folder.readings(data)
    kinds, sites = values_of(seen, "fault_kind", ""), seen["struck_site"].values
    faults, sizes = seen["fault"].values, seen["deviation_max"].values
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(runs(judged, folder.setups, list(map(str, seen["trial"].values)))):
        true = true_cause(str(faults[number]), str(kinds[number]), str(sites[number]))
        if true is None:
            continue
        row = {"trial": run.trial, "fault": faults[number], "site": sites[number], "true": true}
        rows.append(
            row
            | _inferred(run, folder.logs.get(run.trial), readings, provenance_of(seen, run.trial))
            | {"deviation_max": float(sizes[number])}
        )
    if not rows:
        names = ", ".join(sorted(set(map(str, faults))))
        raise ConfigError(
            f"out={out}: no cause is defined for its faults ({names:.100}); allowed: a folder with others"
        )
    table = pd.DataFrame(rows)
    return Confusion(table, _matrix(table), _types(table), seen.sizes["trial"] - len(rows))


def visible(judged: xr.Dataset) -> xr.Dataset:
    """The finished faulty trials whose damage can be seen."""
    faulty = studied(judged)
    is_seen = (faulty["visibility"].values == VISIBLE) & faulty["complete"].values
    return faulty.isel(trial=np.flatnonzero(is_seen))


def _inferred(
    run: TrialSignals, log: Any, readings: Callable[[str], BatchReader], provenance: Mapping[str, str]
) -> dict[str, Any]:
    reading = readings(run.trial)
    incident = worst(of_one(run, log, is_asked=True, reading=reading))
    if incident is None:
        return {"inferred": NOT_SEEN, "reason": "", "type": 0, "is_sure": False}
    finding = diagnosed(run, incident, reading, provenance).finding
    told = {"inferred": finding.cause, "reason": finding.reason, "type": incident.outcome}
    return told | {"is_sure": incident.is_sure}


def _matrix(table: pd.DataFrame) -> pd.DataFrame:
    """True causes by inferred ones: all of either, in the order of `CAUSES`."""
    columns = [name for name in (*CAUSES, NOT_SEEN) if name in (*CAUSES, *table["inferred"])]
    counts = pd.crosstab(table["true"], table["inferred"])
    rows = [name for name in CAUSES if name in counts.index]
    return counts.reindex(index=rows, columns=columns, fill_value=0)


def _types(table: pd.DataFrame) -> pd.DataFrame:
    total = int((table["type"] > 0).sum())
    counts = [int((table["type"] == number).sum()) for number in TYPES]
    low, high = wilson_interval(np.array(counts), np.full(len(counts), total))
    shares = np.array(counts) / total if total else np.full(len(counts), np.nan)
    columns = {
        "type": list(TYPES.values()),
        "count": counts,
        "incidents": total,
        "share": shares,
        "low": low,
        "high": high,
    }
    return pd.DataFrame(columns)
