"""Whether a curve shows that something is wrong to somebody who knows what is healthy around each step."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import maximum_filter1d, minimum_filter1d

# Steps on either side of a step whose golden values tell what is usual there: enough to span the noise of batches, few
# enough that the loss has hardly fallen meanwhile.
WINDOW = 10
# By how much of its own width the range is widened on either side. 21 normal values span 3.8 standard deviations on
# average, so a value leaves the widened range at about 5.7 of them: where the spike score puts a spike (OLMo: 6).
MARGIN = 1.0


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
    return ~is_inside & np.isfinite(golden)[twin] & is_measured
