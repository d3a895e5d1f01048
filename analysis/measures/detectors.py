"""What detectors say of runs that are stored: with any constants, and scored against what is known of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.statistics import studied, wilson_interval
from harness.config import NO_FAULT, ConfigError, checked, field_types, sections
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS

TRIALS_AT_ONCE = 256
PER = 1000  # steps, of which false alarms are counted


def options_of(name: str, given: Mapping[str, Any]) -> Any:
    """The constants of a detector: its own, but for those `given`, by field. Raises ConfigError."""
    if name not in DETECTORS:
        raise ConfigError(f"detect={name}: unknown detector; allowed: {', '.join(sorted(DETECTORS))}")
    cls: Any = sections().get(f"detect.{name}")
    known = field_types(cls) if cls else {}
    for key, value in given.items():
        if key not in known:
            allowed = ", ".join(f"detect.{name}.{field}" for field in known) or "no field"
            raise ConfigError(f"detect.{name}.{key}={value}: unknown key; allowed: {allowed}")
    return cls and cls(**{key: checked(f"detect.{name}.{key}", cls, key, value) for key, value in given.items()})


def alarms(sweep: xr.Dataset, name: str, **constants: Any) -> xr.Dataset:
    """`alarm`, bool, and `score` [trial, step] of a detector, as it says them while the runs train, bit for bit.

    `sweep` is from `analysis.reading.open_sweep`; `constants` are fields of its `Options`. Steps that a trial has not
    taken have neither. Raises ConfigError for a name, a field or a value that there is not, and for a sweep without a
    signal that the detector watches.
    """
    options = options_of(name, constants)
    missing = [signal for signal in DETECTORS[name].watches if signal not in sweep]
    if missing:
        raise ConfigError(f"detect={name}: the sweep has no {', '.join(missing)}; allowed: one that has measured it")
    if (ranks := sweep.sizes.get("rank", 1)) < (least := DETECTORS[name].least_ranks):
        raise ConfigError(f"detect={name}: the sweep has train.ranks={ranks} at most; allowed: one of at least {least}")
    shape = sweep.sizes["trial"], sweep.sizes["step"]
    is_alarm, score = np.zeros(shape, bool), np.full(shape, np.nan)
    for begin in range(0, shape[0], TRIALS_AT_ONCE):
        block = sweep.isel(trial=slice(begin, begin + TRIALS_AT_ONCE))
        signals = {signal: block[signal].transpose("trial", "step", ...).values for signal in DETECTORS[name].watches}
        rows = slice(begin, begin + TRIALS_AT_ONCE)
        is_alarm[rows], score[rows] = replay(DETECTORS[name], options, signals, taken(block))
    dims = ("trial", "step")
    return xr.Dataset({"alarm": (dims, is_alarm), "score": (dims, score)}, coords=sweep.coords)


def measured(sweep: xr.Dataset) -> list[str]:
    """The detectors whose signals the sweep has."""
    ranks = sweep.sizes.get("rank", 1)
    heard = (name for name, cls in DETECTORS.items() if set(cls.watches) <= set(sweep.data_vars))
    return [name for name in heard if ranks >= DETECTORS[name].least_ranks]


def taken(sweep: xr.Dataset) -> np.ndarray:
    """The steps that each trial has trained in, [trial, step]: none after it froze, or whose batch was dropped."""
    is_dropped = sweep["loss"].isnull() & (sweep["dropped"] > 0) & (sweep["step"] != sweep["nonfinite_step"])
    return (sweep["tokens"].notnull() & ~is_dropped).transpose("trial", "step").values


def last_step(is_taken: np.ndarray) -> int:
    """The last of the steps [steps] that a run has taken; -1 if it has taken none."""
    return int(np.flatnonzero(is_taken)[-1]) if is_taken.any() else -1


def carried(values: np.ndarray, is_taken: np.ndarray) -> np.ndarray:
    """A run's signal [steps, ...], which stands still where the run did: at steps before its last that it did not take.

    These have the value of the last step before that was taken, or else of the first.
    """
    last = last_step(is_taken)
    if is_taken[: last + 1].all():
        return values
    at = np.arange(len(is_taken))
    source = np.maximum.accumulate(np.where(is_taken, at, is_taken.argmax()))
    return values[np.where(at < last, source, at)]


def scored(sweep: xr.Dataset, names: Sequence[str], constants: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """How well each detector does, a row each: what it misses, and what it takes for an alarm that is none.

    - `incidents`: trials whose fault changed something; `recall`: the share of them in which there is an alarm from the
      fault's first step on that their golden twin has not at that step, with its 95% Wilson interval.
    - `latency`: median of the steps from the fault's begin to that alarm, and `latency_95` their 95th percentile.
    - `clean_steps`, and `false_alarms` per 1,000 of them, with the interval: of all golden runs that trained to the
      end. Steps follow each other, so the interval is too narrow where alarms come in bursts.

    Raises ConfigError as `alarms` does.
    """
    faulty = studied(sweep)
    faulty = faulty.isel(trial=np.flatnonzero((faulty["changes"] > 0).values & faulty["complete"].values))
    is_clean = (sweep["fault"] == NO_FAULT.name) & (sweep["outcome"] == "trained")
    clean = sweep.isel(trial=np.flatnonzero(is_clean.values))
    twin = pd.Index(sweep["trial"].values).get_indexer(faulty["golden"].values)
    begins = faulty["fault_start"].values.astype(int) if "fault_start" in faulty.coords else np.zeros(len(twin), int)
    rows = []
    for name in names:
        of_all = alarms(sweep, name, **constants.get(name, {}))["alarm"]
        here = of_all.sel(trial=faulty["trial"]).values
        new = here & ~np.where((twin >= 0)[:, None], of_all.values[twin], False)
        new &= np.arange(new.shape[1]) >= begins[:, None]
        is_seen = np.asarray(new.any(axis=1))
        latency = (new.argmax(1) - begins)[is_seen]
        of_clean, steps = of_all.sel(trial=clean["trial"]).values, int(taken(clean).sum())
        low, high = wilson_interval(is_seen.sum(), len(is_seen))
        fewest, most = wilson_interval(of_clean.sum(), steps)
        rows.append(
            {
                "detector": name,
                "incidents": len(is_seen),
                "recall": is_seen.mean() if len(is_seen) else np.nan,
                "recall_low": float(low),
                "recall_high": float(high),
                "latency": float(np.median(latency)) if len(latency) else np.nan,
                "latency_95": float(np.quantile(latency, 0.95)) if len(latency) else np.nan,
                "clean_steps": steps,
                "false_alarms": PER * of_clean.sum() / steps if steps else np.nan,
                "false_alarms_low": PER * float(fewest),
                "false_alarms_high": PER * float(most),
            }
        )
    return pd.DataFrame(rows)
