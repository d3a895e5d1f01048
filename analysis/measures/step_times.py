"""How long a step takes with a mitigation, against how long without."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from analysis.measures.paired import Estimate
from analysis.measures.statistics import bootstrap
from analysis.reading.twins import blocks

SIGNAL = "step_seconds"


@dataclass(frozen=True)
class StepTimes:
    """Median time of a step in each pack of a group, in seconds, and whether a pack holds other mitigations too.

    There is at least one pack.
    """

    packs: np.ndarray
    is_shared: bool

    @property
    def seconds(self) -> float:
        return float(np.median(self.packs))

    def relative_to(self, base: StepTimes) -> Estimate:
        """The ratio to `base`, as value and as change. The interval draws the packs of both: NaN for one pack."""

        def ratio(packs: np.ndarray, others: np.ndarray) -> np.ndarray:
            return np.asarray(np.median(packs, axis=-1) / np.median(others, axis=-1))

        measured = float(ratio(self.packs, base.packs)), *bootstrap(self.packs, ratio, base.packs, interpolated=True)
        return Estimate(*measured, *measured)


def step_times(sweep: xr.Dataset, clean: pd.DataFrame) -> dict[tuple[int, str], StepTimes]:
    """By `place` and `mitigation` of the trials in `clean`, which has `row` (their number in `sweep`) and `pack` too.

    Empty for results that have no times, such as those of older versions. Reads `step_seconds` a block at a time.
    """
    if SIGNAL not in sweep:
        return {}
    seconds = np.full(sweep.sizes["trial"], np.nan)
    for block in blocks(sweep[SIGNAL], np.sort(clean["row"])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a trial of which no step was timed
            seconds[block] = np.nanmedian(sweep[SIGNAL].isel(trial=block).values, axis=1)
    mitigations = pd.Series(sweep["mitigation"].values).groupby(sweep["pack"].values).nunique()
    timed = clean.assign(seconds=seconds[clean["row"]]).dropna(subset=["seconds"])
    times = {}
    for key, group in timed.groupby(["place", "mitigation"]):
        packs = group.groupby("pack")["seconds"].median()
        times[key] = StepTimes(packs.to_numpy(), bool((mitigations[packs.index] > 1).any()))
    return times
