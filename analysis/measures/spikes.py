"""How many steps of a run are spikes, by the spike score of OLMo 2."""

from __future__ import annotations

import numpy as np
import pandas as pd

LAST, FEWEST = 1_000, 50  # values from whose mean a spike lies apart


def spike_score(values: np.ndarray, deviations: float = 7.0) -> np.ndarray:
    """Share of the measured steps at which a signal lies `deviations` from the mean of its last values.

    In standard deviations of the last 1,000 values, or of as many as there are, at least 50; with 7 it is the spike
    score of OLMo 2 (arXiv 2501.00656). Where all of the last values are equal nothing is measured.

    Args:
        values: [trial, step]; NaN where nothing was measured.
        deviations: How many standard deviations make a spike.

    Returns:
        [trial], between 0 and 1; NaN for a trial that has no such step.
    """
    last = pd.DataFrame(values.T).shift(1).rolling(LAST, min_periods=FEWEST)
    mean, deviation = last.mean().to_numpy().T, last.std(ddof=0).to_numpy().T
    known = np.where(deviation > 0, values, np.nan)
    return share_of_finite(known - mean, np.abs(known - mean) >= deviations * deviation)


def share_of_finite(values: np.ndarray, holds: np.ndarray) -> np.ndarray:
    """Of the finite values of each trial the share of which it holds, [trial]; NaN where there are none."""
    count: np.ndarray = np.isfinite(values).sum(axis=1)
    return np.where(count, holds.sum(axis=1) / np.maximum(count, 1), np.nan)
