"""Groups of trials, by number."""

from __future__ import annotations

import numpy as np
import pandas as pd


def split(number: np.ndarray, values: pd.Series | np.ndarray) -> np.ndarray:
    """The groups numbered `number` [n], each split by `values` [n] in their order; missing values are one."""
    codes, different = pd.factorize(values, sort=True, use_na_sentinel=False)
    return np.unique(number * len(different) + codes, return_inverse=True)[1]
