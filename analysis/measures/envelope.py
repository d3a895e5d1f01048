"""The clean envelope: how far golden runs drift apart after the last bit of one number was changed, step by step.

It is the yardstick for "the fault mattered". Drift takes time to grow, so a fault is held to the envelope of as many
steps as it was watched for: E_max(n) is the largest |D_t| that a clean run reaches within n steps of its change, and
E_final(n) the largest |mean of D_t| over the final steps of a clean run that is cut off there. What the envelope does
not know is when in training the change was made: one curve serves strikes at all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr
from numpy.lib.stride_tricks import sliding_window_view

from analysis.reading.groups import is_seed, splitting
from analysis.reading.levels import word
from analysis.reading.twins import Trials, deviation_blocks, final_window, numbers_of
from harness.basics.printing import count
from harness.config.names import LAST_BIT

# A further clean run leaves an envelope that is the largest of n with probability 1 / (n + 1): 11% for eight.
FEWEST_TWINS = 8
MOST_NAMED = 5  # recipes that a warning lists


@dataclass(frozen=True)
class Envelope:
    """The envelopes of a sweep's recipes. Column k of a curve is the envelope of the steps 0 to k since the change."""

    number: np.ndarray  # [trial], the trial's recipe
    names: list[str]  # [recipe]
    twins: np.ndarray  # numbers along `trial` of the clean runs that measure it
    watched: np.ndarray  # [recipe], for how many steps at most a clean run was; 0 where there is none
    largest: np.ndarray  # [recipe with clean runs + 1, steps], E_max in nat/token; the last row is NaN
    final: np.ndarray  # the same of E_final
    row: np.ndarray  # [recipe], its row in the two, the last for a recipe without clean runs

    @classmethod
    def of(cls, sweep: xr.Dataset, trials: Trials) -> Envelope:
        """Reads `loss` of the last_bit trials that are finished, and so is their twin, a block at a time."""
        number, names = recipes(sweep)
        is_clean = trials.has_twin & (trials.fault == LAST_BIT) & ~trials.is_idle & ~changes_another_bit(sweep)
        clean = np.flatnonzero(is_clean)
        measured = np.unique(number[clean])
        row = np.full(len(names), len(measured))
        row[measured] = np.arange(len(measured))
        largest, final = np.full((2, len(measured) + 1, max(1, sweep.sizes["step"])), np.nan)
        for block, deviation in deviation_blocks(sweep, trials, clean, trials.begin):
            drift, recipe = _since(deviation, trials.begin[block]), row[number[block]]
            np.fmax.at(largest, recipe, np.fmax.accumulate(np.abs(drift), axis=1))
            np.fmax.at(final, recipe, _final_sizes(drift, final_window(trials.steps[block]).astype(int)))
        watched = np.zeros(len(names), dtype=int)
        np.maximum.at(watched, number[clean], (trials.steps - trials.begin)[clean])
        return cls(number, names, clean, watched, largest, final, row)

    def at(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E_max and E_final for each trial, watched for `steps` [trial] of them: two arrays [trial], NaN for none.

        Beyond the longest clean run they stay as they are there.
        """
        place = self.row[self.number], np.clip(steps, 1, self.largest.shape[1]) - 1
        return self.largest[place], self.final[place]


def recipes(sweep: xr.Dataset) -> tuple[np.ndarray, list[str]]:
    """Which trials share their config but for seeds and fault: the recipe's number [trial], and each recipe's name.

    A name holds the fields in which the recipes differ, such as `width=32, lr=0.01`; a single one is `all trials`.
    """
    paths = {name: str(values.attrs.get("path", "fault")) for name, values in sweep.coords.items()}
    kept = {str(name): sweep[name].values for name, path in paths.items() if path.split(".")[0] != "fault"}
    kept = {name: values for name, values in kept.items() if not is_seed(paths[name])}
    # A field that follows from the others, such as one that a mitigation sets, would only make names longer.
    fields, number = splitting(np.zeros(sweep.sizes["trial"], dtype=int), kept)
    table = pd.DataFrame({field: kept[field] for field in fields}, index=range(len(number)))
    heads = table.iloc[np.unique(number, return_index=True)[1]]
    names = [", ".join(f"{field}={word(row[field])}" for field in fields) for _, row in heads.iterrows()]
    return number, names if fields else ["all trials"]


def changes_another_bit(sweep: xr.Dataset) -> np.ndarray:
    """Which trials have the fault `last_bit`, but set to another bit than the last: [trial]. They are no yardstick."""
    is_probe: np.ndarray = (sweep["fault"].values == LAST_BIT) & (numbers_of(sweep, "fault_bit", 0) > 0)
    return is_probe


def weaknesses(sweep: xr.Dataset, trials: Trials, envelope: Envelope) -> list[str]:
    """What there is to say against the envelopes of a sweep, a line each: too few clean runs, too short, not clean."""
    lines = []
    if others := int(changes_another_bit(sweep).sum()):
        lines.append(f"{others} trials with fault={LAST_BIT} change another bit than the last; they do not count")
    if idle := int((trials.is_idle & (trials.fault == LAST_BIT)).sum()):
        lines.append(f"{count(idle, 'trial')} with fault={LAST_BIT} changed no bit; they do not count")
    counts = np.bincount(envelope.number[envelope.twins], minlength=len(envelope.names))
    judged = np.flatnonzero(trials.has_twin & (trials.fault != LAST_BIT))
    needed = np.unique(envelope.number[judged])
    if thin := [f"{envelope.names[recipe]} has {counts[recipe]}" for recipe in needed if counts[recipe] < FEWEST_TWINS]:
        rest = [f"and {len(thin) - MOST_NAMED} more recipes have too few"] if len(thin) > MOST_NAMED else []
        lines.append(
            f"a recipe wants at least {FEWEST_TWINS} finished trials with fault={LAST_BIT}; "
            f"{'; '.join(thin[:MOST_NAMED] + rest)}"
        )
    longest = envelope.watched[envelope.number[judged]]
    if longer := int(((longest > 0) & ((trials.steps - trials.begin)[judged] > longest)).sum()):
        lines.append(
            f"{longer} of {len(judged)} faults struck so early that they were watched for longer than any trial with "
            f"fault={LAST_BIT} of their recipe; their envelope counts as staying as it was"
        )
    is_newly_lost = trials.is_lost & ~trials.is_lost[trials.golden]
    if number := int(is_newly_lost[envelope.twins].sum()):
        lines.append(
            f"{number} of {len(envelope.twins)} trials with fault={LAST_BIT} became non-finite, unlike their golden "
            "twin; they count up to there"
        )
    return [f"clean envelope: {line}" for line in lines]


def _since(values: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """`values` [n, steps] shifted so that column 0 is step `begin` [n], and NaN beyond their end: [n, steps]."""
    place = begin[:, None] + np.arange(values.shape[1])
    shifted = np.take_along_axis(values, np.minimum(place, values.shape[1] - 1), axis=1)
    return np.where(place < values.shape[1], shifted, np.nan)


def _final_sizes(drift: np.ndarray, window: np.ndarray) -> np.ndarray:
    """|Mean of D over the last `window` [n] steps| of runs that end at each step in turn: [n, steps].

    As for whole runs, these are the steps up to the last at which D is known; NaN as long as none is.
    """
    known = ~np.isnan(drift)
    means = np.empty(drift.shape)
    for size in np.unique(window):
        runs = window == size
        # Before the change there is nothing, so the first windows are shorter.
        padded = [np.pad(values[runs], ((0, 0), (size - 1, 0))) for values in (np.where(known, drift, 0.0), known)]
        total, count = (sliding_window_view(values, size, axis=1).sum(axis=-1) for values in padded)
        means[runs] = np.abs(total) / np.maximum(count, 1)
    last = np.maximum.accumulate(np.where(known, np.arange(drift.shape[1]), -1), axis=1)
    return np.where(last >= 0, np.take_along_axis(means, np.maximum(last, 0), axis=1), np.nan)
