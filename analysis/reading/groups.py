"""Groups of trials, by number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from harness.config.names import OWN


def flat_config(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Path -> value, of a configuration in sections; lists as text."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_config(value, f"{before}{name}.")
        else:
            flat[f"{before}{name}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def is_seed(path: str) -> bool:
    """Whether a field of the config is a seed, or the digest of initial weights, which an attached run has instead."""
    return path.split(".")[-1] == "seed" or path == f"{OWN}.start"


def split(number: np.ndarray, values: pd.Series | np.ndarray) -> np.ndarray:
    """The groups numbered `number` [n], each split by `values` [n] in their order; missing values are one."""
    codes, different = pd.factorize(values, sort=True, use_na_sentinel=False)
    return np.unique(number * len(different) + codes, return_inverse=True)[1]


def splitting(number: np.ndarray, columns: Mapping[str, pd.Series | np.ndarray]) -> tuple[list[str], np.ndarray]:
    """The columns that split the groups numbered `number` [n], each those that are left by the ones before.

    Also the columns that are left by all. A column that follows from the others is not among them.
    """
    names = []
    for name, values in columns.items():
        finer = split(number, values)
        if finer.max(initial=0) > number.max(initial=0):
            names.append(name)
            number = finer
    return names, number
