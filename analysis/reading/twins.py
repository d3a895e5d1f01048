"""Trials beside their golden twins: which is whose, when the fault struck, and how far the losses are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from analysis.reading.levels import numbers
from harness.config import NO_FAULT
from harness.objectives.outcome import WINDOW_SHARE

# Losses are averaged over the judge's window, but over so many steps: one step's batch is too noisy to compare by.
FEWEST_FINAL_STEPS = 5
# Of losses that are in memory at once, so that the number of trials has no bound.
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Trials:
    """What is known of each trial of a sweep as `analysis.reading.open_sweep` gives it: arrays along `trial`."""

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

    @property
    def is_lost(self) -> np.ndarray:
        """Which became non-finite."""
        is_nonfinite: np.ndarray = ~np.isnan(self.nonfinite_step)
        return is_nonfinite

    @property
    def twin(self) -> np.ndarray:
        """`golden` where there is a finished twin, else 0."""
        return np.where(self.has_twin, self.golden, 0)

    @classmethod
    def of(cls, sweep: xr.Dataset) -> Trials:
        fault, complete = sweep["fault"].values, sweep["complete"].values
        golden = pd.Index(sweep["trial"].values).get_indexer(sweep["golden"].values)
        is_faulty = fault != NO_FAULT.name
        return cls(
            fault,
            complete,
            golden,
            is_faulty & complete & (golden >= 0) & (complete[golden] if len(golden) else complete),
            np.nan_to_num(numbers_of(sweep, "fault_start", 0)).astype(int),
            sweep["steps"].values.astype(int),
            sweep["outcome"].values,
            sweep["nonfinite_step"].values,
            sweep["masked_step"].values,
            is_faulty & complete & (sweep["changes"].values == 0),
        )


def values_of(sweep: xr.Dataset, name: str, missing: Any) -> np.ndarray:
    """A coordinate [trial]; `missing` where there is none, since no trial has a value or all are alike."""
    return sweep[name].values if name in sweep.coords else np.full(sweep.sizes["trial"], missing)


def numbers_of(sweep: xr.Dataset, name: str, missing: float) -> np.ndarray:
    """`values_of` as float64 [trial], with NaN for null as well."""
    return numbers(values_of(sweep, name, missing))


def final_window(steps: Any) -> Any:
    """How many steps at the end of runs of `steps` steps (an array) are averaged: 5%, at least 5, at most all."""
    return np.minimum(np.maximum(np.ceil(WINDOW_SHARE * steps), FEWEST_FINAL_STEPS), steps)


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


def deviations(curves: np.ndarray, golden: np.ndarray, begin: np.ndarray | int = 0) -> np.ndarray:
    """D_t = loss_t(faulty) - loss_t(golden), [n, steps]; NaN before step `begin` [n] and where a loss is not finite."""
    with np.errstate(invalid="ignore"):
        difference = curves.astype("float64") - golden
    is_after = np.arange(curves.shape[1]) >= np.reshape(begin, (-1, 1))
    return np.where(is_after & np.isfinite(difference), difference, np.nan)


def deviation_blocks(
    sweep: xr.Dataset, trials: Trials, rows: np.ndarray, begin: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`rows` (numbers of trials with a twin, rising) a block at a time, and their `deviations` from `begin` [trial]."""
    for block in blocks(sweep["loss"], rows):
        yield block, deviations(*twin_curves(sweep["loss"], block, trials.golden[block]), begin[block])


def after_last(holds: np.ndarray, otherwise: np.ndarray | int) -> np.ndarray:
    """The step after the last at which it holds [n, steps], `otherwise` if it never does: [n]."""
    last = holds.shape[1] - np.argmax(holds[:, ::-1], axis=1) if holds.shape[1] else 0
    return np.where(holds.any(axis=1), last, otherwise)
