"""The faults of a sweep that changed something, their family and damage, and when the loss spiked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.detectors import taken
from analysis.measures.judged_faults import site_labels
from analysis.measures.outcomes import UNJUDGED, golden_range, outcomes_and_notes
from analysis.reading.open_sweep import UNFINISHED
from analysis.reading.twins import Trials
from harness.config import NO_FAULT
from harness.config.names import LAST_BIT
from harness.objectives.outcome import NON_FINITE

FAMILIES = {
    "weight": "weights",
    "buffer": "buffers",
    "activation": "activations",
    "activation_gradient": "gradients",
    "gradient": "gradients",
    "reduced_gradient": "gradients",
    "clipped_gradient": "gradients",
    "moment_1": "moments",
    "moment_2": "moments",
    "update": "updates",
    "learning_rate": "learning rate",
    "loss_scale": "loss scale",
    "batch": "data",
}
"""By the site that a fault struck."""
HARMLESS, SLIGHT, CLEAR, LARGE, LOST = "up to 1", "1 to 3", "3 to 10", "over 10", "non-finite"
SIZES = (HARMLESS, SLIGHT, CLEAR, LARGE, LOST)
"""Of what a fault did to the final loss, in clean envelopes."""
DAMAGING = (LARGE, LOST)
BOUNDS = (1.0, 3.0, 10.0)  # envelopes


@dataclass(frozen=True)
class KnownFaults:
    """What is scored: `table` has a row an incident, `clean` the numbers along `trial` of the golden runs.

    Columns of `table`: `trial` and `twin`, numbers along `trial`; `begin`, the fault's first step; `fault`, `family`;
    `damage`, the final deviation in envelopes, infinite if the run became non-finite and its twin did not, or if there
    is no envelope and the loss moved; `size`, of `SIZES`; `spike`, the first step at which the loss is above the range
    that its golden run has around that step (`analysis.measures.outcomes.golden_range`) or is not finite, NaN if there
    is none.
    """

    table: pd.DataFrame
    clean: np.ndarray
    notes: list[str]

    @classmethod
    def of(cls, sweep: xr.Dataset) -> KnownFaults:
        """Those of a sweep of `open_sweep`: finished, with a finished golden twin, and that changed something."""
        judged, notes = outcomes_and_notes(sweep)
        trials, outcome = Trials.of(sweep), judged["fault_outcome"].values
        is_struck = trials.has_twin & (sweep["changes"].values > 0) & ~np.isin(outcome, ("", UNFINISHED, UNJUDGED))
        rows = np.flatnonzero(is_struck & (trials.fault != LAST_BIT))
        table = pd.DataFrame({"trial": rows, "twin": trials.golden[rows], "begin": trials.begin[rows]})
        table["fault"] = trials.fault[rows]
        table["family"] = pd.Series(site_labels(sweep)[rows]).map(lambda site: FAMILIES.get(site, site))
        with np.errstate(divide="ignore", invalid="ignore"):
            envelope = np.nan_to_num(judged["envelope_final"].values[rows])  # without one whatever moves is large
            damage = judged["deviation_final"].values[rows] / envelope
        table["damage"] = np.where(outcome[rows] == NON_FINITE, np.inf, damage)
        table["size"] = [_size(value, word) for value, word in zip(damage, outcome[rows], strict=True)]
        table["spike"] = _spikes(sweep, table)
        is_clean = (trials.fault == NO_FAULT.name) & (trials.ending == "trained")
        return cls(table, np.flatnonzero(is_clean), notes)


def _size(damage: float, outcome: str) -> str:
    """Without an envelope, or with one of 0, whatever moved the loss is large."""
    if outcome == NON_FINITE:
        return LOST
    return SIZES[int(np.searchsorted(BOUNDS, damage))] if damage == damage else HARMLESS


def measured_steps(sweep: xr.Dataset, rows: np.ndarray) -> np.ndarray:
    """Where the trials numbered `rows` have a loss, or have it no more because they froze: [n, steps]."""
    part = sweep.isel(trial=rows)
    return np.asarray(taken(part) | (part["step"] >= part["nonfinite_step"]).transpose("trial", "step").values)


def _spikes(sweep: xr.Dataset, table: pd.DataFrame) -> np.ndarray:
    """The step at which each incident's loss first spikes: [n]. One that was not taken has no loss, and no spike."""
    if table.empty:
        return np.empty(0)
    loss = sweep["loss"].values
    twins, place = np.unique(table["twin"], return_inverse=True)
    high = golden_range(loss[twins])[1][place]
    curves, golden = loss[table["trial"]], loss[table["twin"]]
    at = np.arange(loss.shape[1])
    with np.errstate(invalid="ignore"):
        spikes = ~(curves <= high) & np.isfinite(golden) & (at >= table["begin"].to_numpy()[:, None])
    spikes &= measured_steps(sweep, table["trial"].to_numpy())
    # After the first value that is not finite nothing is measured; that value is the last that can be a spike.
    return np.where(spikes.any(axis=1), spikes.argmax(axis=1), np.nan)
