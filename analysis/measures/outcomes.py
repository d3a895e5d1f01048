"""What each fault did: masked, recovered, lingering, divergent, non-finite, or nothing (idle). By written rules.

D_t = loss_t(faulty) - loss_t(golden) is the deviation at step t, from the trial's strike (its `start`) on. How much of
it means nothing is measured, not chosen: it is the clean envelope (`analysis.measures.envelope`).
"""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import xarray as xr
from scipy.ndimage import maximum_filter1d, minimum_filter1d

from analysis.measures.envelope import Envelope, weaknesses
from analysis.reading.open_sweep import UNFINISHED
from analysis.reading.twins import Trials, after_last, blocks, deviations, final_window, twin_curves
from harness.config import NO_FAULT
from harness.objectives.outcome import DIVERGENT, ENDED_BADLY, LOST_SHARE, NON_FINITE

MASKED, RECOVERED, LINGERING = "masked", "recovered", "lingering"
OUTCOMES = (MASKED, RECOVERED, LINGERING, DIVERGENT, NON_FINITE)
# A fault is made up for once the loss lies at most so far above golden, averaged over so many steps.
SETTLED_NAT, SETTLED_WINDOW = 0.1, 10
# Steps on either side of a step whose golden values tell what is usual there: enough to span the noise of batches, few
# enough that the loss has hardly fallen meanwhile.
WINDOW = 10
# By how much of its own width the range is widened on either side. 21 normal values span 3.8 standard deviations on
# average, so a value leaves the widened range at about 5.7 of them: where the spike score puts a spike (OLMo: 6).
MARGIN = 1.0
IDLE = "idle"  # the fault never fired, or wrote what was there: that is none of the five, and no share counts it
UNJUDGED = "unjudged"  # there is no golden run to compare with
SILENT, VISIBLE = "silent", "visible"

# The coordinates that `outcomes` adds: long name and units.
IN_NAT, IN_STEPS = {"units": "nat/token"}, {"units": "step"}
JUDGED: dict[str, tuple[str, dict[str, str]]] = {
    "deviation_max": ("largest deviation of the loss from golden", IN_NAT),
    "deviation_final": ("final deviation of the loss from golden", IN_NAT),
    "envelope_max": ("largest deviation of a clean run watched as long", IN_NAT),
    "envelope_final": ("largest final deviation of a clean run watched as long", IN_NAT),
    "fault_outcome": ("outcome of the fault", {}),
    "recovery_steps": ("steps from the strike until the loss was inside the clean envelope for good", IN_STEPS),
    "settling_steps": ("steps from the strike until the loss was level with golden for good", IN_STEPS),
    "visibility": ("whether loss, gradient norm or finiteness showed the fault", {}),
    "visible_steps": ("steps from the strike until the fault did not show any more", IN_STEPS),
    "idle": ("whether the fault never fired or changed nothing", {}),
}


def outcomes(sweep: xr.Dataset) -> xr.Dataset:
    """`sweep`, as `analysis.reading.open_sweep` gives it, with what each fault did as coordinates along `trial`.

    - `deviation_max` = max abs(D_t), `deviation_final` = abs(mean of D_t over the final steps) (nat/token). The final
      steps are 5% of the run, at least 5, from the strike on; of a run that became non-finite, or whose twin did, the
      last ones at which both losses are finite. NaN without a fault, without a finished golden twin, and where no loss
      since the strike is finite.
    - `envelope_max`, `envelope_final`: the largest of each over the `last_bit` trials of the same recipe
      (`analysis.measures.envelope.recipes`), each cut off as many steps after its change as the trial has after its
      strike. NaN if there are none. A warning names the recipes with fewer than 8. A trial whose `last_bit` was given
      another bit is none of them.
    - `fault_outcome`: the first of these that holds.

      1. "": no fault.
      2. unfinished: the trial's pack is not complete.
      3. non-finite: the trial became non-finite and its golden twin did not.
      4. idle: the fault changed nothing, as `idle` says, and what follows would call it masked.
      5. masked: the whole state was bitwise the twin's again (`masked_step`).
      6. unjudged: there is no finished golden twin; or it became non-finite itself, so that there is no ending to
         compare with, unless the trial did so at the same step and never left the envelope before (masked).
      7. masked: the loss never left the envelope, deviation_max <= envelope_max.
      8. divergent: the trial diverged, has never learned or is hacked by the harness's criterion (`outcome`), its
         golden twin is none of these, and the trial ended above the twin by more than half of what that had learned,
         its first loss less its mean over the final steps.
      9. recovered: it ended inside, deviation_final <= envelope_final.
      10. lingering: it ended outside.

      So a trial whose golden twin diverges too is masked, recovered or lingering by its deviation from it. Without an
      envelope rule 7 never holds, and rule 9 takes an envelope of 0: the final losses are on average the twin's own.
    - `recovery_steps`: from the strike to the first step from which on abs(D_t) <= envelope_max; 0 if masked. NaN if
      the trial did not recover, is idle, or was outside at its last step, so that its return was not seen. The envelope
      is as tight as rounding, so this is the time until nothing at all is left of the fault.
    - `settling_steps`: from the strike to the first step from which on the mean of D over 10 steps, that one and the
      next nine, is at most 0.1 nat/token: until what the fault cost is made up for, all but a tenth of a nat. 0 if it
      never was larger, so that a poisoned batch counts while it is read. NaN if the mean over the last ten steps was
      larger, if the trial or its twin became non-finite, and without a fault or a finished golden twin.
    - `visibility`: "visible" if from the strike on the loss or the gradient norm left the range of the golden values
      around that step (`golden_range`), or if they or the trial were not finite where the golden one is;
      else "silent". "" without a fault or a finished golden twin.
    - `visible_steps`: from the strike to the first step from which on loss and gradient norm stay in those ranges,
      which is the time until somebody who watches the run sees nothing any more; 0 if silent. Else NaN if one of the
      two was outside at the trial's last step, or if the trial or its twin became non-finite; and NaN without a fault
      or a finished golden twin.
    - `idle`: a finished trial whose fault changed nothing, because it never fired or wrote what was there.

    Reads `loss` and `grad_norm` of the faulty trials and their twins, a block of trials at a time, once, and the losses
    of last_bit trials twice. All other variables stay lazy.

    Args:
        sweep: As `analysis.open_sweep` gives it.

    Returns:
        The same, with these coordinates.
    """
    judged, notes = outcomes_and_notes(sweep)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return judged


def outcomes_and_notes(sweep: xr.Dataset) -> tuple[xr.Dataset, list[str]]:
    """What `outcomes` makes of `sweep`, and what there is to say about the clean envelope, a line each, unwarned."""
    trials = Trials.of(sweep)
    envelope = Envelope.of(sweep, trials)
    envelope_max, envelope_final = envelope.at(trials.steps - trials.begin)
    table = _measure(sweep, trials, limit=np.nan_to_num(envelope_max))
    table = table.assign(envelope_max=envelope_max, envelope_final=envelope_final)
    is_lost, is_twin_lost = trials.is_lost, trials.is_lost[trials.twin]

    outcome = _fault_outcome(trials, table)
    was_back = (outcome == RECOVERED) & (table["settled"] < trials.steps)
    recovery = (table["settled"] - trials.begin).where(was_back).mask(outcome == MASKED, 0)
    is_silent = trials.has_twin & (table["hidden"] == trials.begin) & ~(is_lost & ~is_twin_lost)
    is_told = trials.has_twin & ~is_lost & ~is_twin_lost
    was_level = is_told & (table["level"] <= np.maximum(trials.steps - SETTLED_WINDOW, trials.begin))
    was_hidden = is_told & (table["hidden"] < trials.steps)
    values = {
        "deviation_max": table["largest"].to_numpy(),
        "deviation_final": table["final"].to_numpy(),
        "envelope_max": envelope_max,
        "envelope_final": envelope_final,
        "fault_outcome": outcome,
        "recovery_steps": recovery.to_numpy(),
        "settling_steps": (table["level"] - trials.begin).where(was_level).to_numpy(),
        "visibility": np.select([~trials.has_twin, is_silent], ["", SILENT], VISIBLE),
        "visible_steps": (table["hidden"] - trials.begin).where(was_hidden | is_silent).to_numpy(),
        "idle": trials.is_idle,
    }
    in_loss = {"units": sweep["loss"].attrs["units"]}
    coordinates = {
        name: xr.Variable("trial", values[name], {"long_name": text} | (in_loss if units is IN_NAT else units))
        for name, (text, units) in JUDGED.items()
    }
    return sweep.assign_coords(coordinates), weaknesses(sweep, trials, envelope)


def _fault_outcome(trials: Trials, table: pd.DataFrame) -> np.ndarray:
    """The rules of `outcomes`, in their order."""
    twin, is_golden_lost = trials.twin, trials.is_lost[trials.twin]
    is_inside = (table["largest"] <= table["envelope_max"]).to_numpy()
    is_bitwise = ~np.isnan(trials.masked_step)
    is_still = ~(table["largest"] > 0).to_numpy()
    is_alike = is_inside & (trials.nonfinite_step == trials.nonfinite_step[twin])
    has_diverged = np.isin(trials.ending, ENDED_BADLY) & ~np.isin(trials.ending[twin], ENDED_BADLY)
    has_diverged &= (table["final_rise"] > LOST_SHARE * table["learned"].clip(lower=0)).to_numpy()
    has_returned = (table["final"] <= table["envelope_final"].fillna(0)).to_numpy()
    rules = [
        (trials.fault == NO_FAULT.name, ""),
        (~trials.complete, UNFINISHED),
        (trials.has_twin & trials.is_lost & ~is_golden_lost, NON_FINITE),
        (trials.is_idle & (is_still | is_bitwise | is_inside), IDLE),
        (is_bitwise, MASKED),
        (~trials.has_twin | (is_golden_lost & ~is_alike), UNJUDGED),
        (is_inside, MASKED),
        (has_diverged, DIVERGENT),
        (has_returned, RECOVERED),
    ]
    return np.select([holds for holds, _ in rules], [outcome for _, outcome in rules], LINGERING)


def _measure(sweep: xr.Dataset, trials: Trials, limit: np.ndarray) -> pd.DataFrame:
    """How far the faulty trials with a twin went: one row for every trial of the sweep, and NaN for the others.

    Columns: `largest` and `final_rise`, the deviations, the latter with its sign, and `final`, its size; `settled`, the
    first step from which on |D_t| <= `limit` [trial]; `level`, the first from which on means of D are small; `hidden`,
    the first from which on loss and gradient norm are where golden ones are; `learned`, by how much the twin has.
    """
    names = ("largest", "final_rise", "settled", "level", "hidden", "learned")
    table = np.full((len(limit), len(names)), np.nan)
    for block in blocks(sweep["loss"], np.flatnonzero(trials.has_twin)):
        curves, golden = twin_curves(sweep["loss"], block, trials.golden[block])
        norms, golden_norms = twin_curves(sweep["grad_norm"], block, trials.golden[block])
        _, twin, twin_of = np.unique(trials.golden[block], return_index=True, return_inverse=True)
        begin = trials.begin[block]
        shows = leaves_range(curves, golden[twin], twin_of) | leaves_range(norms, golden_norms[twin], twin_of)
        hidden = after_last(shows & (np.arange(curves.shape[1]) >= begin[:, None]), begin)
        deviation = deviations(curves, golden, begin)
        window = final_window(trials.steps[block])
        sizes = _sizes(deviation, window, begin, limit[block])
        learned = _learned(golden[twin], window[twin].astype(int))[twin_of]
        table[block] = np.column_stack([*sizes, _level(deviation, begin, trials.steps[block]), hidden, learned])
    measured = pd.DataFrame(table, columns=names)
    return measured.assign(final=measured["final_rise"].abs())


def _learned(golden: np.ndarray, window: np.ndarray) -> np.ndarray:
    """The first finite loss of each golden curve [n, steps] less the mean of its last `window` [n]: [n], NaN: none."""
    learned = np.full(len(golden), np.nan)
    for number, (curve, size) in enumerate(zip(golden.astype("float64"), window, strict=True)):
        if len(loss := curve[np.isfinite(curve)]):
            learned[number] = loss[0] - loss[-size:].mean()
    return learned


def _level(deviation: np.ndarray, begin: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Of D_t [n, steps] the first step from which on every mean over the window that begins there is small: [n]."""
    known = ~np.isnan(deviation)
    both = np.stack([np.where(known, deviation, 0.0), known])
    sums = np.pad(both.cumsum(axis=2), ((0, 0), (0, 0), (1, SETTLED_WINDOW)), mode="edge")
    sums[:, :, 0] = 0
    totals, counts = sums[:, :, SETTLED_WINDOW:-1] - sums[:, :, : -SETTLED_WINDOW - 1]
    at = np.arange(deviation.shape[1])
    last = np.maximum(steps - SETTLED_WINDOW, begin)[:, None]  # a window that is cut off by the end is none
    is_window = (at >= begin[:, None]) & (at <= last) & (counts > 0)
    return after_last(is_window & (totals > SETTLED_NAT * counts), begin)


def _sizes(deviation: np.ndarray, window: np.ndarray, begin: np.ndarray, limit: np.ndarray) -> list[np.ndarray]:
    """Of D_t [n, steps] the largest size, the final mean, and the step from which on it is in `limit`."""
    known = ~np.isnan(deviation)
    size = np.where(known, np.abs(deviation), -1.0)
    largest = size.max(axis=1, initial=-1.0)
    end = after_last(known, 0)
    is_final = known & (np.arange(deviation.shape[1]) >= (end - window)[:, None])
    total = np.where(is_final, deviation, 0.0).sum(axis=1)
    final = total / np.maximum(is_final.sum(axis=1), 1)
    has_any = known.any(axis=1)
    settled = after_last(size > limit[:, None], begin)
    return [np.where(has_any, values, np.nan) for values in (largest, final, settled)]


def golden_range(golden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), each [n, steps]: what is usual around each step of golden curves [n, steps].

    The smallest and the largest finite value within 10 steps, moved apart by the distance between them on either side.
    Not finite where there is no finite value.
    """
    golden = golden.astype("float64")
    finite = np.isfinite(golden)
    size = 2 * WINDOW + 1
    # Repeating the value at the edge, as "nearest" does, changes neither of the two.
    low = minimum_filter1d(np.where(finite, golden, np.inf), size, axis=1, mode="nearest")
    high = maximum_filter1d(np.where(finite, golden, -np.inf), size, axis=1, mode="nearest")
    reach = MARGIN * (high - low)
    return low - reach, high + reach


def leaves_range(values: np.ndarray, golden: np.ndarray, twin: np.ndarray) -> np.ndarray:
    """Where each curve of `values` [n, steps] leaves the range of its `golden` one, or is not finite there: [n, steps].

    `golden` is [m, steps], and `twin` [n] the row of it to which a curve belongs. Steps at which the golden value is
    not finite tell nothing, and neither does a curve without one finite value, which was not measured.
    """
    low, high = golden_range(golden)
    with np.errstate(invalid="ignore"):
        is_inside = (values >= low[twin]) & (values <= high[twin])
    is_measured = np.isfinite(values).any(axis=1, keepdims=True)
    return np.asarray(~is_inside & np.isfinite(golden)[twin] & is_measured)
