"""By how many steps signals, and alarms of detectors, lead the spike of the loss that a fault causes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.detectors import alarms, taken
from analysis.measures.known_faults import KnownFaults, measured_steps
from analysis.measures.leaderboard import first_seen
from analysis.measures.outcomes import leaves_range
from analysis.measures.statistics import median_interval, wilson_interval
from harness.config import NO_FAULT
from harness.detectors.base import AFTER_THE_STEP
from harness.detectors.loop_signals import RATE

NO_SYMPTOMS = ("loss", "validation_loss", "tokens", "dropped", "learning_rate", RATE, "loss_scale", "step_seconds")
SIGNAL, DETECTOR = "signal", "detector"


def leads(sweep: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """Steps from the first sign to the loss spike: a row an incident whose loss spikes, a column a signal or detector.

    A spike is the first step from the fault's on at which the loss is above the range that its golden run has around
    that step, or is not finite. A signal's sign is that it leaves its own such range, to any side and in any layer; the
    truth is known here, so this is the most that a detector could have of it. A detector's is that an incident is seen
    (`analysis.measures.leaderboard`). What is known when a step is over counts at the next. NaN: no sign up to the end,
    and in a signal that was not measured. Columns are pairs of `signal` or `detector` and the name.
    """
    incidents = KnownFaults.of(sweep).table
    incidents = incidents[incidents["spike"].notna()].reset_index(drop=True)
    if incidents.empty:
        return pd.DataFrame()
    found = {(SIGNAL, name): _departures(sweep, name, incidents) for name in signals(sweep)}
    for name in names:
        found[DETECTOR, name] = first_seen(alarms(sweep, name)["alarm"].values, incidents)
    return pd.DataFrame({key: incidents["spike"].to_numpy() - first for key, first in found.items()})


def lead_table(found: pd.DataFrame) -> pd.DataFrame:
    """`leads` in a row each, the largest share that leads first.

    `spikes`; `leads`: the share with a sign a step or more before the spike, with its 95% Wilson interval; `with_it`:
    at the same step; `later`; `never`; `lead`: the median of the steps over all that have a sign at or before the
    spike, `lead_low` and `lead_high` its 95% bootstrap interval, and `lead_95` its 95th percentile.
    """
    rows = []
    for (kind, name), lead in found.items():
        values = lead.to_numpy()
        in_time = values[values >= 0]
        low, high = wilson_interval((values > 0).sum(), len(values))
        median, least, most = median_interval(in_time)
        rows.append(
            {
                "what": kind,
                "name": name,
                "spikes": len(values),
                "leads": (values > 0).mean() if len(values) else np.nan,
                "leads_low": float(low),
                "leads_high": float(high),
                "with_it": (values == 0).mean() if len(values) else np.nan,
                "later": (values < 0).mean() if len(values) else np.nan,
                "never": np.isnan(values).mean() if len(values) else np.nan,
                "lead": median,
                "lead_low": least,
                "lead_high": most,
                "lead_95": float(np.quantile(in_time, 0.95)) if len(in_time) else np.nan,
            }
        )
    table = pd.DataFrame(rows)
    return table if table.empty else table.sort_values(["what", "leads"], ascending=[False, False], ignore_index=True)


def signals(sweep: xr.Dataset) -> list[str]:
    """The signals of a sweep that may be signs: measured at each step, and not what a detector or the clock says.

    One is measured at each step if the golden runs that trained to the end have it at every step that they took. Of one
    that is read now and then, a range of some steps around a step would have a value or two.
    """
    is_golden = (sweep["fault"] == NO_FAULT.name) & (sweep["outcome"] == "trained")
    golden = sweep.isel(trial=np.flatnonzero(is_golden.values))
    is_taken = taken(golden)
    names = [
        str(name)
        for name, values in sweep.data_vars.items()
        if {"trial", "step"} <= set(values.dims)
        and name not in NO_SYMPTOMS
        and not str(name).startswith(("alarm_", "score_", "validation_", "tokens_"))
    ]
    return [name for name in names if not (_is_missing(golden[name]) & is_taken).any()]


def _is_missing(signal: xr.DataArray) -> np.ndarray:
    """Where there is no value, in any layer: [trial, step]."""
    others = [dim for dim in signal.dims if dim not in ("trial", "step")]
    return signal.isnull().all(others).transpose("trial", "step").values


def _departures(sweep: xr.Dataset, name: str, incidents: pd.DataFrame) -> np.ndarray:
    """The step at which a signal of each incident first leaves the range of its golden run: [n], NaN for none."""
    twins, place = np.unique(incidents["twin"], return_inverse=True)
    rows = incidents["trial"].to_numpy()
    signal = sweep[name].transpose("trial", "step", ...)
    curves, golden = (signal.isel(trial=chosen).values for chosen in (rows, twins))
    curves, golden = (x.reshape(*x.shape[:2], -1) for x in (curves, golden))
    layers = range(curves.shape[2])
    leaves = np.any([leaves_range(curves[..., i], golden[..., i], place) for i in layers], axis=0)
    leaves &= np.arange(leaves.shape[1]) >= incidents["begin"].to_numpy()[:, None]
    leaves &= measured_steps(sweep, rows)
    first = np.where(leaves.any(axis=1), leaves.argmax(axis=1), np.nan)
    return first + (name in AFTER_THE_STEP)
