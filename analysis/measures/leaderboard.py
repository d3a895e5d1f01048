"""Detectors on the same incidents and the same clean runs: what each sees, how soon, and how often it is wrong.

An incident is *seen* at the first step from the fault's on at which there is an alarm that its golden twin has not at
that step. As a fault moves later alarms of a nervous detector about, some are seen by chance; `chance` is the most that
this can be: the share that would be seen if each fault only made another clean run of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.detectors import PER, alarmed, alarmed_with_each, options_of, taken, watched
from analysis.measures.known_faults import DAMAGING, LOST, SIZES, KnownFaults
from analysis.measures.statistics import bootstrap, wilson_interval

QUIET = 5  # steps without an alarm that end an episode
PACK = 8  # rows that share a step, in which the cost is measured
THRESHOLDS = ("sigma", "limit", "ratio", "growth", "fall", "rise", "factor", "alpha")
RATIOS = ("ratio", "growth", "fall")
AS_THEY_ARE: Mapping[str, Mapping[str, Any]] = {}  # constants
NO_THRESHOLD = 1e30  # a limit that a run has to name
FACTORS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)


def leaderboard(
    sweep: xr.Dataset,
    incidents: KnownFaults,
    names: Sequence[str],
    constants: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each detector, the best recall of damaging faults first; and when it saw each incident.

    Detectors joined by `+` have an alarm where any of them has.
    The latter has a column a detector and a row an incident of `incidents`, with the step, or NaN. Of the former:

    - `incidents`, and `recall` of all of them; `damaging`: those that moved the final loss by more than ten clean
      envelopes or made the run non-finite, and the recall of those, `recall_damaging`, with its 95% Wilson interval;
      `chance`: the share of the damaging that could be seen by chance.
    - `at_once`: the share of the damaging that is seen at the very step of the fault's begin; `latency`, `latency_95`:
      the median and the 95th percentile of the steps until they are seen, of those that are; `latency_lost`: the most
      steps from the first value that is not finite to an alarm, infinite where there is none.
    - `lead`: the median of the steps by which an alarm comes before the loss spikes, where both happen; `leads`: the
      share of the spikes that it leads by a step or more.
    - `clean_steps`, and `false_alarms` per 1,000 of them, of golden runs that trained to the end, from their first step
      on, with Wilson's interval, which takes steps for independent. `false_high_runs`: the upper end of a bootstrap
      over whole runs, which does not; it knows nothing where there is no alarm. `episodes` per 1,000 steps: alarms with
      fewer than five quiet steps between them are one. `alarmed_runs`: the share of clean runs with an alarm.
    - `microseconds`: of a step of a trial, in a pack of eight, measured here.

    Raises ConfigError as `alarms` does.
    """
    rows, seen = [], {}
    for name in names:
        is_alarm = alarmed(sweep, name, constants or {})
        seen[name] = first_seen(is_alarm, incidents.table)
        row = {"detector": name, **_scores(sweep, incidents, is_alarm, seen[name])}
        rows.append(row | {"microseconds": _microseconds(sweep, name, constants or {})})
    return pd.DataFrame(rows).sort_values("recall_damaging", ascending=False, ignore_index=True), pd.DataFrame(seen)


def _scores(sweep: xr.Dataset, incidents: KnownFaults, is_alarm: np.ndarray, first: np.ndarray) -> dict[str, Any]:
    """A detector's row of `leaderboard`, from its alarms [trial, step] and the steps at which it saw incidents [n]."""
    table = incidents.table
    is_seen, is_damaging = ~np.isnan(first), table["size"].isin(DAMAGING).to_numpy()
    latency = first - table["begin"].to_numpy()
    of_damaging = latency[is_damaging & is_seen]
    row: dict[str, Any] = {"incidents": len(table), "recall": _share(is_seen)}
    row["damaging"], row["recall_damaging"] = int(is_damaging.sum()), _share(is_seen[is_damaging])
    ends = wilson_interval(is_seen[is_damaging].sum(), is_damaging.sum())
    row["recall_low"], row["recall_high"] = map(float, ends)
    row["chance"] = chance(is_alarm, incidents, table["begin"].to_numpy()[is_damaging])
    row["at_once"] = _share((latency == 0)[is_damaging])
    row["latency"], row["latency_95"] = _quantile(of_damaging, 0.5), _quantile(of_damaging, 0.95)
    row["latency_lost"] = _latency_lost(sweep, table, is_alarm)
    lead = (table["spike"].to_numpy() - first)[table["spike"].notna().to_numpy()]
    row["lead"], row["leads"] = _quantile(lead[~np.isnan(lead)], 0.5), _share(lead > 0)
    return row | false_alarms(is_alarm[incidents.clean], taken(sweep.isel(trial=incidents.clean)))


def by_group(incidents: KnownFaults, seen: pd.DataFrame, by: str) -> pd.DataFrame:
    """Recall of each detector by `size` of damage, or of damaging incidents by `family` or `fault`.

    `seen` is from `leaderboard`. A row a group, with its number of `incidents`.
    """
    table = incidents.table
    table = table if by == "size" else table[table["size"].isin(DAMAGING)]
    groups = [size for size in SIZES if (table["size"] == size).any()] if by == "size" else sorted(set(table[by]))
    shares = seen.loc[table.index].notna().groupby(table[by]).mean().reindex(groups)
    shares.insert(0, "incidents", table[by].value_counts().reindex(groups))
    return shares.rename_axis(by).reset_index()


def scored(
    sweep: xr.Dataset, names: Sequence[str], constants: Mapping[str, Mapping[str, Any]] = AS_THEY_ARE
) -> pd.DataFrame:
    """How well each detector does, a row each: what it misses, and what it takes for an alarm that is none.

    Args:
        sweep: As `analysis.open_sweep` gives it.
        names: Of detectors.
        constants: Fields of their `Options` that are not the defaults, by name of the detector.

    Returns:
        Columns: `incidents` (faults that changed something, finished together with their golden twins); `recall`, the
        share of them that is seen, with its 95% Wilson interval; `latency`, the median of the steps from the fault's
        begin to that alarm, and `latency_95`, their 95th percentile; `clean_steps`, and `false_alarms` per 1,000 of
        them, with the interval, of all golden runs that trained to the end. Steps follow each other, so that interval
        is too narrow where alarms come in bursts.

    Raises:
        ConfigError: As `alarms`.
    """
    incidents = KnownFaults.of(sweep)
    is_taken, rows = taken(sweep.isel(trial=incidents.clean)), []
    for name in names:
        is_alarm = alarmed(sweep, name, constants)
        first = first_seen(is_alarm, incidents.table)
        is_seen = ~np.isnan(first)
        latency = (first - incidents.table["begin"].to_numpy())[is_seen]
        low, high = wilson_interval(is_seen.sum(), len(is_seen))
        false = false_alarms(is_alarm[incidents.clean], is_taken)
        rows.append(
            {
                "detector": name,
                "incidents": len(is_seen),
                "recall": _share(is_seen),
                "recall_low": float(low),
                "recall_high": float(high),
                "latency": _quantile(latency, 0.5),
                "latency_95": _quantile(latency, 0.95),
                "clean_steps": false["clean_steps"],
                "false_alarms": false["false_alarms"],
                "false_alarms_low": false["false_low"],
                "false_alarms_high": false["false_high"],
            }
        )
    return pd.DataFrame(rows)


def first_seen(is_alarm: np.ndarray, table: pd.DataFrame) -> np.ndarray:
    """The step at which each incident is seen, NaN if it is not: [n]."""
    if table.empty:
        return np.empty(0)
    at = np.arange(is_alarm.shape[1])
    new = is_alarm[table["trial"]] & ~is_alarm[table["twin"]] & (at >= table["begin"].to_numpy()[:, None])
    return np.where(new.any(axis=1), new.argmax(axis=1), np.nan)


def chance(is_alarm: np.ndarray, incidents: KnownFaults, begins: np.ndarray) -> float:
    """How many of incidents that begin so would be seen if each fault only made another clean run of its own."""
    clean = is_alarm[incidents.clean]
    if not len(clean) or not len(begins):
        return np.nan
    return float(np.mean([clean[:, begin:].any(axis=1).mean() for begin in begins]))


def false_alarms(is_alarm: np.ndarray, is_taken: np.ndarray) -> dict[str, float]:
    """What there is of alarms [runs, steps] in clean runs that took these steps."""
    steps, wrong = int(is_taken.sum()), is_alarm & is_taken
    low, high = wilson_interval(wrong.sum(), steps)
    of_runs = np.stack([wrong.sum(axis=1), is_taken.sum(axis=1)])

    def pooled(drawn: np.ndarray) -> np.ndarray:
        return np.asarray(drawn[0].sum(axis=-1) / drawn[1].sum(axis=-1))

    def rate(events: int) -> float:
        return PER * events / steps if steps else np.nan

    ends = bootstrap(of_runs.astype(float), pooled) if len(wrong) > 1 else (np.nan, np.nan)
    return {
        "clean_runs": len(wrong),
        "clean_steps": steps,
        "false_alarms": rate(int(wrong.sum())),
        "false_low": PER * float(low),
        "false_high": PER * float(high),
        "false_high_runs": PER * ends[1],
        "episodes": rate(episodes(wrong)),
        "alarmed_runs": _share(wrong.any(axis=1)),
    }


def episodes(is_alarm: np.ndarray) -> int:
    """Alarms [runs, steps] of which those with fewer than `QUIET` steps between them count as one."""
    padded = np.pad(is_alarm, ((0, 0), (QUIET, 0)))
    before = np.stack([padded[:, lag : lag + is_alarm.shape[1]] for lag in range(QUIET)]).any(axis=0)
    return int((is_alarm & ~before).sum())


def _latency_lost(sweep: xr.Dataset, table: pd.DataFrame, is_alarm: np.ndarray) -> float:
    """NaN where nothing became non-finite, infinite where that was not seen."""
    lost = table[table["size"] == LOST]
    steps = sweep["nonfinite_step"].values[lost["trial"]].astype(int)
    here = is_alarm[lost["trial"]] & (np.arange(is_alarm.shape[1]) >= steps[:, None])
    latency = np.where(here.any(axis=1), here.argmax(axis=1) - steps, np.inf)
    return float(latency.max()) if len(latency) else np.nan


def _microseconds(sweep: xr.Dataset, name: str, constants: Mapping[str, Mapping[str, Any]]) -> float:
    part = watched(sweep, [name]).isel(trial=slice(0, PACK)).load()
    started = time.perf_counter()
    alarmed(part, name, constants)
    return 1e6 * (time.perf_counter() - started) / (part.sizes["trial"] * part.sizes["step"])


def _thresholds(name: str) -> dict[str, Any]:
    options = options_of(name, {})
    fields = dict(vars(options)) if options else {}
    return {key: value for key, value in fields.items() if key in THRESHOLDS and value < NO_THRESHOLD}


def _scaled(thresholds: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {key: 1 + (value - 1) * factor if key in RATIOS else value * factor for key, value in thresholds.items()}


def _share(holds: np.ndarray) -> float:
    return float(holds.mean()) if len(holds) else np.nan


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else np.nan


def moved(
    sweep: xr.Dataset, names: Sequence[str], factors: Sequence[float] = FACTORS
) -> Iterator[tuple[str, float, np.ndarray]]:
    """Alarms [trial, step] of each detector as its thresholds move: its name, the factor (1: its own), and these.

    The thresholds are the fields of its options named in `THRESHOLDS`; a ratio, which lies above 1, moves by its
    distance from 1. A detector without any has its own alone. Raises ConfigError as `alarms` does.
    """
    for name in names:
        usual = {part: _thresholds(part) for part in name.split("+")}
        own = tuple(factors) if any(usual.values()) else (1.0,)
        each = [{part: _scaled(thresholds, factor) for part, thresholds in usual.items()} for factor in own]
        for factor, is_alarm in zip(own, alarmed_with_each(sweep, name, each), strict=True):
            yield name, factor, is_alarm


def tradeoff(
    sweep: xr.Dataset, incidents: KnownFaults, names: Sequence[str], factors: Sequence[float] = FACTORS
) -> pd.DataFrame:
    """Recall of damaging incidents against false alarms as thresholds move (`moved`): a row a detector and factor.

    Columns: `detector`, `factor` (1: its own constants), `recall`, `false_alarms` per 1,000 clean steps, `clean_steps`.
    """
    damaging = incidents.table[incidents.table["size"].isin(DAMAGING)].reset_index(drop=True)
    is_taken = taken(sweep.isel(trial=incidents.clean))
    rows = []
    for name, factor, is_alarm in moved(sweep, names, factors):
        false = false_alarms(is_alarm[incidents.clean], is_taken)
        row = {"detector": name, "factor": factor, "recall": _share(~np.isnan(first_seen(is_alarm, damaging)))}
        rows.append(row | {key: false[key] for key in ("false_alarms", "clean_steps")})
    return pd.DataFrame(rows)
