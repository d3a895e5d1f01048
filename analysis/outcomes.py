"""What each fault did: masked, recovered, lingering, divergent or non-finite; silent or visible. By written rules.

D_t = loss_t(faulty) - loss_t(golden) is the deviation at step t, from the trial's strike (its `start`) on. How much of
it means nothing is measured, not chosen: golden runs that differ by the last bit of one number, which are the trials
with the fault `last_bit`, drift apart as well. How far they do is the clean envelope.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.open_sweep import UNFINISHED
from analysis.ranges import leaves_range
from harness.config import NO_FAULT

LAST_BIT = "last_bit"  # the fault whose trials measure the clean envelope

MASKED, RECOVERED, LINGERING, DIVERGENT, NON_FINITE = "masked", "recovered", "lingering", "divergent", "non-finite"
OUTCOMES = (MASKED, RECOVERED, LINGERING, DIVERGENT, NON_FINITE)
UNJUDGED = "unjudged"  # there is no golden run to compare with
SILENT, VISIBLE = "silent", "visible"

# A further clean run leaves an envelope that is the largest of n with probability 1 / (n + 1): 11% for eight.
FEWEST_TWINS = 8
# The last steps, over which losses are averaged: one step's batch is too noisy to compare trials by.
FINAL_SHARE, FEWEST_FINAL_STEPS = 0.05, 5
# Of losses that are in memory at once, so that the number of trials has no bound.
BLOCK_BYTES = 16 * 2**20

# The coordinates that `outcomes` adds: long name and units.
JUDGED: dict[str, tuple[str, str | None]] = {
    "deviation_max": ("largest deviation of the loss from golden", "nat/token"),
    "deviation_final": ("final deviation of the loss from golden", "nat/token"),
    "envelope_max": ("largest deviation of a clean run", "nat/token"),
    "envelope_final": ("largest final deviation of a clean run", "nat/token"),
    "fault_outcome": ("outcome of the fault", None),
    "recovery_steps": ("steps from the strike until the loss was golden again", "step"),
    "visibility": ("whether loss, gradient norm or finiteness showed the fault", None),
    "idle": ("whether the fault never fired or changed nothing", None),
}


def outcomes(sweep: xr.Dataset) -> xr.Dataset:
    """`sweep`, as `analysis.open_sweep` gives it, with what each fault did as coordinates along `trial`.

    - `deviation_max` = max |D_t| and `deviation_final` = |mean of D_t over the final steps| (nat/token). The final
      steps are 5% of the run, at least 5, from the strike on; of a run that became non-finite, or whose twin did, the
      last ones at which both losses are finite. NaN without a fault, without a finished golden twin, and where no loss
      since the strike is finite.
    - `envelope_max`, `envelope_final`: the largest of each over the `last_bit` trials of the same recipe (`recipes`).
      NaN if there are none. A warning names the recipes with fewer than 8.
    - `fault_outcome`: the first of these that holds.

      1. "": no fault.
      2. unfinished: the trial's pack is not complete.
      3. non-finite: the trial became non-finite and its golden twin did not.
      4. masked: the whole state was bitwise the twin's again (`masked_step`), or the fault is idle and moved no loss.
      5. unjudged: there is no finished golden twin; or it became non-finite itself, so that there is no ending to
         compare with, unless the trial did so at the same step and never left the envelope before (masked).
      6. masked: the loss never left the envelope, deviation_max <= envelope_max.
      7. divergent: the trial diverged by the harness's criterion (`outcome`), and its golden twin did not.
      8. recovered: it ended inside, deviation_final <= envelope_final.
      9. lingering: it ended outside.

      So a trial whose golden twin diverges too is masked, recovered or lingering by its deviation from it. Without an
      envelope rule 6 never holds, and rule 8 takes an envelope of 0: the final losses are on average the twin's own.
    - `recovery_steps`: from the strike to the first step from which on |D_t| <= envelope_max; 0 if masked. NaN if the
      trial did not recover, or was outside at its last step, so that its return was not seen.
    - `visibility`: "visible" if from the strike on the loss or the gradient norm left the range of the golden values
      around that step (`analysis.ranges`), or was not finite where the golden one is; else "silent". "" without a fault
      or a finished golden twin.
    - `idle`: a finished trial whose fault changed nothing, because it never fired or wrote what was there.

    Reads `loss` and `grad_norm` of the faulty trials and their twins, a block of trials at a time, once, and those of
    last_bit trials twice. All other variables stay lazy.
    """
    trials = _Trials.of(sweep)
    number, names = recipes(sweep)
    clean = np.flatnonzero(trials.has_twin & (trials.fault == LAST_BIT))
    drift = _measure(sweep, trials, clean, limit=np.zeros(len(trials.fault)))
    envelope_max = _largest(drift["largest"].to_numpy(), clean, number)
    envelope_final = _largest(drift["final"].to_numpy(), clean, number)
    _warn_of_thin_envelopes(trials, clean, number, names)

    rows = np.flatnonzero(trials.has_twin)
    measured = _measure(sweep, trials, rows, limit=np.nan_to_num(envelope_max))
    table = measured.assign(envelope_max=envelope_max, envelope_final=envelope_final)
    outcome = _fault_outcome(trials, table)
    was_back = (outcome == RECOVERED) & (table["settled"] < trials.steps)
    recovery = (table["settled"] - trials.begin).where(was_back).mask(outcome == MASKED, 0)
    visibility = np.where(table["visible"] == 1, VISIBLE, SILENT)
    values = {
        "deviation_max": table["largest"].to_numpy(),
        "deviation_final": table["final"].to_numpy(),
        "envelope_max": envelope_max,
        "envelope_final": envelope_final,
        "fault_outcome": outcome,
        "recovery_steps": recovery.to_numpy(),
        "visibility": np.where(trials.has_twin, visibility, ""),
        "idle": trials.is_idle,
    }
    return sweep.assign_coords({name: xr.Variable("trial", values[name], _attributes(name)) for name in JUDGED})


def final_window(steps: Any) -> Any:
    """How many steps at the end of runs of `steps` steps (an array) are averaged: 5%, at least 5, at most all."""
    return np.minimum(np.maximum(np.ceil(FINAL_SHARE * steps), FEWEST_FINAL_STEPS), steps)


def recipes(sweep: xr.Dataset) -> tuple[np.ndarray, list[str]]:
    """Which trials share their config but for seeds and fault: the recipe's number [trial], and each recipe's name.

    A name holds the fields in which the recipes differ, such as `width=32, lr=0.01`; a single one is `all trials`.
    """
    table, number = pd.DataFrame(index=range(sweep.sizes["trial"])), np.zeros(sweep.sizes["trial"], dtype=int)
    for name, values in sweep.coords.items():
        parts = str(values.attrs.get("path", "fault")).split(".")
        if parts[0] != "fault" and parts[-1] != "seed":
            finer = pd.DataFrame({"number": number, "value": values.values})
            split = finer.groupby(["number", "value"], dropna=False, sort=True).ngroup().to_numpy()
            # A field that follows from the others, such as one that a mitigation sets, would only make names longer.
            if split.max(initial=0) > number.max(initial=0):
                table[name], number = values.values, split
    heads = table.iloc[np.unique(number, return_index=True)[1]]
    names = [", ".join(f"{field}={_shown(row[field])}" for field in table.columns) for _, row in heads.iterrows()]
    return number, names if len(table.columns) else ["all trials"]


def _shown(value: Any) -> str:
    """As it stands on a command line, where what is missing is null."""
    return "null" if pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


def with_outcomes(sweep: xr.Dataset) -> xr.Dataset:
    """`sweep` if it has been through `outcomes`, else what that makes of it."""
    return sweep if "fault_outcome" in sweep.coords else outcomes(sweep)


# --- what is known of each trial ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trials:
    """Arrays along `trial`."""

    fault: np.ndarray
    complete: np.ndarray
    golden: np.ndarray  # number of the twin's trial, where `has_twin`
    has_twin: np.ndarray  # a faulty trial that is finished, and so is its twin
    begin: np.ndarray  # step of the strike
    steps: np.ndarray
    ending: np.ndarray  # the harness's word
    nonfinite_step: np.ndarray
    masked_step: np.ndarray
    is_idle: np.ndarray

    @classmethod
    def of(cls, sweep: xr.Dataset) -> _Trials:
        fault, complete = sweep["fault"].values, sweep["complete"].values
        golden = pd.Index(sweep["trial"].values).get_indexer(sweep["golden"].values)
        is_faulty = fault != NO_FAULT.name
        # Where no fault has a start, or all are alike and no trial is without, there is no such coordinate.
        begin = sweep["start"].values if "start" in sweep.coords else np.zeros(len(fault))
        return cls(
            fault,
            complete,
            golden,
            is_faulty & complete & (golden >= 0) & (complete[golden] if len(golden) else complete),
            np.nan_to_num(begin).astype(int),
            sweep["steps"].values,
            sweep["outcome"].values,
            sweep["nonfinite_step"].values,
            sweep["masked_step"].values,
            is_faulty & complete & (sweep["changes"].values == 0),
        )


def _fault_outcome(trials: _Trials, table: pd.DataFrame) -> np.ndarray:
    """The rules of `outcomes`, in their order."""
    twin = np.where(trials.has_twin, trials.golden, 0)
    is_lost, is_golden_lost = ~np.isnan(trials.nonfinite_step), ~np.isnan(trials.nonfinite_step[twin])
    is_inside = (table["largest"] <= table["envelope_max"]).to_numpy()
    is_bitwise = ~np.isnan(trials.masked_step) | (trials.is_idle & ~(table["largest"] > 0).to_numpy())
    is_alike = is_inside & (trials.nonfinite_step == trials.nonfinite_step[twin])
    has_diverged = (trials.ending == DIVERGENT) & (trials.ending[twin] != DIVERGENT)
    has_returned = (table["final"] <= table["envelope_final"].fillna(0)).to_numpy()
    rules = [
        (trials.fault == NO_FAULT.name, ""),
        (~trials.complete, UNFINISHED),
        (trials.has_twin & is_lost & ~is_golden_lost, NON_FINITE),
        (is_bitwise, MASKED),
        (~trials.has_twin | (is_golden_lost & ~is_alike), UNJUDGED),
        (is_inside, MASKED),
        (has_diverged, DIVERGENT),
        (has_returned, RECOVERED),
    ]
    return np.select([holds for holds, _ in rules], [word for _, word in rules], LINGERING)


# --- the clean envelope ------------------------------------------------------------------------------------------


def _largest(values: np.ndarray, rows: np.ndarray, number: np.ndarray) -> np.ndarray:
    """For each trial the largest of `values` at those `rows` that have its recipe, NaN for none: [trial]."""
    largest = pd.Series(values[rows]).groupby(number[rows]).max()
    return largest.reindex(number).to_numpy(dtype=float)


def _warn_of_thin_envelopes(trials: _Trials, clean: np.ndarray, number: np.ndarray, names: list[str]) -> None:
    counts = np.bincount(number[clean], minlength=len(names))
    judged = np.unique(number[trials.has_twin & (trials.fault != LAST_BIT)])
    thin = [f"{names[recipe]} has {counts[recipe]}" for recipe in judged if counts[recipe] < FEWEST_TWINS]
    if thin:
        warnings.warn(
            f"clean envelope: a recipe wants at least {FEWEST_TWINS} finished trials with fault={LAST_BIT}; "
            f"{'; '.join(thin)}",
            stacklevel=3,
        )
    lost = clean[~np.isnan(trials.nonfinite_step[clean]) & np.isnan(trials.nonfinite_step[trials.golden[clean]])]
    if len(lost):
        warnings.warn(
            f"clean envelope: {len(lost)} of {len(clean)} trials with fault={LAST_BIT} became non-finite, unlike their "
            "golden twin; they count up to there",
            stacklevel=3,
        )


# --- deviations, measured ----------------------------------------------------------------------------------------


def _measure(sweep: xr.Dataset, trials: _Trials, rows: np.ndarray, limit: np.ndarray) -> pd.DataFrame:
    """Of the trials numbered `rows`, one row for every trial of the sweep and NaN for the others.

    Columns: `largest` and `final`, the deviations; `settled`, the first step from which on |D_t| <= `limit` [trial];
    `visible`, 0 or 1.
    """
    table = np.full((len(limit), 4), np.nan)
    for block in blocks(sweep["loss"], rows):
        curves, golden = twin_curves(sweep["loss"], block, trials.golden[block])
        norms, golden_norms = twin_curves(sweep["grad_norm"], block, trials.golden[block])
        twins, twin = np.unique(trials.golden[block], return_index=True)
        twin_of = np.searchsorted(twins, trials.golden[block])
        begin = trials.begin[block]
        is_after = np.arange(curves.shape[1]) >= begin[:, None]
        shows = leaves_range(curves, golden[twin], twin_of) | leaves_range(norms, golden_norms[twin], twin_of)
        window = final_window(trials.steps[block])
        deviations = _deviations(curves, golden, is_after)
        table[block] = np.column_stack(
            [*_sizes(deviations, window, begin, limit[block]), (shows & is_after).any(axis=1)]
        )
    return pd.DataFrame(table, columns=["largest", "final", "settled", "visible"])


def blocks(variable: xr.DataArray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """`rows` (numbers along `trial`, rising) in parts to be read at once: whole chunks, of 16 MiB or a single one."""
    size = variable.dtype.itemsize * max(1, variable.sizes["step"])
    ends = np.cumsum(variable.chunks[0]) if variable.chunks else np.arange(1, variable.sizes["trial"] + 1)
    chunk = np.searchsorted(ends, rows, side="right")
    begin = 0
    while begin < len(rows):
        full = begin + max(1, BLOCK_BYTES // size)
        # The first row of the chunk that does not fit any more, unless that is the first chunk of all.
        end = len(rows) if full >= len(rows) else int(np.searchsorted(chunk, chunk[full]))
        end = end if end > begin else int(np.searchsorted(chunk, chunk[begin], side="right"))
        yield rows[begin:end]
        begin = end


def twin_curves(variable: xr.DataArray, rows: np.ndarray, golden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values [n, steps] of the trials numbered `rows` and of their twins numbered `golden`, each read once."""
    wanted, place = np.unique(np.concatenate([rows, golden]), return_inverse=True)
    values = variable.isel(trial=wanted).values
    return values[place[: len(rows)]], values[place[len(rows) :]]


def _deviations(curves: np.ndarray, golden: np.ndarray, is_after: np.ndarray) -> np.ndarray:
    """D_t [n, steps]; NaN before the strike and where either loss is not finite."""
    with np.errstate(invalid="ignore"):
        deviations = curves.astype("float64") - golden
    return np.where(is_after & np.isfinite(deviations), deviations, np.nan)


def _sizes(deviations: np.ndarray, window: np.ndarray, begin: np.ndarray, limit: np.ndarray) -> list[np.ndarray]:
    """Of D_t [n, steps] the largest size, the size of the final mean, and the step from which on it is in `limit`."""
    known = ~np.isnan(deviations)
    size = np.where(known, np.abs(deviations), -1.0)
    largest = size.max(axis=1, initial=-1.0)
    end = _after_last(known, 0)
    is_final = known & (np.arange(deviations.shape[1]) >= (end - window)[:, None])
    total = np.where(is_final, deviations, 0.0).sum(axis=1)
    final = np.abs(total) / np.maximum(is_final.sum(axis=1), 1)
    has_any = known.any(axis=1)
    settled = _after_last(size > limit[:, None], begin)
    return [np.where(has_any, values, np.nan) for values in (largest, final, settled)]


def _after_last(holds: np.ndarray, otherwise: np.ndarray | int) -> np.ndarray:
    """The step after the last at which it holds [n, steps], `otherwise` if it never does: [n]."""
    last = holds.shape[1] - np.argmax(holds[:, ::-1], axis=1) if holds.shape[1] else 0
    return np.where(holds.any(axis=1), last, otherwise)


def _attributes(name: str) -> dict[str, str]:
    long_name, units = JUDGED[name]
    return {"long_name": long_name} | ({"units": units} if units else {})
