"""What sounds before a run diverges by itself, as at too high a rate: how often, how early, and how often for nothing.

A run without a fault *ends badly* if its outcome is divergent or non-finite (harness/objectives/outcome.py). It begins
to at its *onset*. A detector has *warned* of it if it has an alarm in the last `HORIZON` steps before the onset, and
leads it by the steps from the first of these on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.detectors import taken
from analysis.measures.leaderboard import FACTORS, false_alarms, moved
from analysis.measures.statistics import median_interval, wilson_interval
from harness.config import NO_FAULT
from harness.objectives.outcome import LOST_SHARE, TRAINED, WINDOW_SHARE, window_means

HORIZON = 50  # steps before the onset in which an alarm is a warning


def onset(loss: np.ndarray, nonfinite_step: float, steps: int) -> float:
    """The step at which a run begins to end badly, from its losses [steps]; NaN: it never does.

    At some step it is, for the first time, what the written criterion of the outcome calls divergent, had it ended
    there: its mean over 5% of the `steps` of a whole run lies so far above the smallest before that more than half of
    what was learned is lost. The onset is the first step of that window at which the loss itself lies above; or the
    step that is not finite (`nonfinite_step`, NaN: none), where that comes first.
    """
    window = max(1, round(WINDOW_SHARE * steps))
    known = np.flatnonzero(np.isfinite(loss))
    known = known[known < nonfinite_step] if nonfinite_step == nonfinite_step else known
    if len(known) < window:
        return nonfinite_step
    values = loss[known].astype(np.float64)
    means = window_means(values, window)
    best = np.minimum(np.minimum.accumulate(means), values[0])
    mark = best + LOST_SHARE * (values[0] - best)
    if not (is_lost := means > mark).any():
        return nonfinite_step
    first = int(is_lost.argmax())
    return float(known[first + int((values[first : first + window] > mark[first]).argmax())])


def unaided(sweep: xr.Dataset) -> pd.DataFrame:
    """The finished runs of a sweep without a fault and without a playbook, a row each.

    Columns: `trial`, its number along `trial`; `is_lost`: it ended badly; `onset`, NaN where it did not.
    """
    is_plain = (sweep["fault"].values == NO_FAULT.name) & sweep["complete"].values
    if "playbook" in sweep.coords:
        is_plain &= sweep["playbook"].values == "none"
    rows = np.flatnonzero(is_plain)
    is_lost = sweep["outcome"].values[rows] != TRAINED
    part, steps = sweep.isel(trial=rows), sweep["steps"].values[rows].astype(int)
    losses = np.where(taken(part), part["loss"].transpose("trial", "step").values, np.nan)
    each = zip(losses, part["nonfinite_step"].values.astype(float), steps, is_lost, strict=True)
    onsets = [onset(loss, broken, count) if lost else np.nan for loss, broken, count, lost in each]
    return pd.DataFrame({"trial": rows, "is_lost": is_lost, "onset": np.array(onsets, float)})


def warning_table(sweep: xr.Dataset, names: Sequence[str], factors: Sequence[float] = FACTORS) -> pd.DataFrame:
    """A row a detector and a factor of its thresholds (1: its own constants; `analysis.measures.leaderboard.tradeoff`).

    - `lost`: runs that end badly; `warned`: the share of these with an alarm in the `HORIZON` steps before the onset,
      with its 95% Wilson interval; `chance`: the share that would be warned of if alarms were those that runs have at
      these very steps which end well; `lead`: the median of the steps from the first of these alarms to the onset, with
      its 95% bootstrap interval; `in_time`: the share with an alarm at the onset or in the steps before it;
      `never`: that without any alarm at all.
    - `well`: runs that end well; `false_alarms` in a thousand of their steps, with Wilson's interval, and
      `alarmed_runs`, the share of them with any.

    Empty where no run ends badly, or none well. Raises ConfigError as `analysis.measures.detectors.alarms` does.
    """
    runs = unaided(sweep)
    lost, well = runs[runs["is_lost"] & runs["onset"].notna()], runs[~runs["is_lost"]]
    if lost.empty or well.empty:
        return pd.DataFrame()
    begins, rows = lost["onset"].to_numpy().astype(int), []
    at = np.arange(sweep.sizes["step"])
    is_before = (at < begins[:, None]) & (at >= begins[:, None] - HORIZON)
    is_taken = taken(sweep.isel(trial=well["trial"].to_numpy()))
    for name, factor, is_alarm in moved(sweep, names, factors):
        of_lost, of_well = is_alarm[lost["trial"]], is_alarm[well["trial"]]
        early = of_lost & is_before
        is_warned = early.any(1)
        lead = (begins - early.argmax(1))[is_warned]
        low, high = wilson_interval(is_warned.sum(), len(lost))
        middle, least, most = median_interval(lead)
        by_chance = [(of_well & before).any(1).mean() for before in is_before]
        false = false_alarms(of_well, is_taken)
        rows.append(
            {
                "detector": name,
                "factor": factor,
                "lost": len(lost),
                "warned": is_warned.mean(),
                "warned_low": float(low),
                "warned_high": float(high),
                "chance": float(np.mean(by_chance)),
                "in_time": (is_warned | of_lost[np.arange(len(lost)), begins]).mean(),
                "never": (~of_lost.any(1)).mean(),
                "lead": middle,
                "lead_low": least,
                "lead_high": most,
                "well": len(well),
                **{key: false[key] for key in ("clean_steps", "false_alarms", "false_low", "false_high")},
                "alarmed_runs": false["alarmed_runs"],
            }
        )
    return pd.DataFrame(rows)
