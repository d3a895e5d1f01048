"""The values of a field along trials as one array: null is a level, as any other value is.

A field that a trial does not have, such as the bit of a trial without a fault, is NaN among numbers and "" among
texts. A field that is null there is the word `NULL`, which no grouping drops; an array of numbers is then one of
objects. Where a field is null in some trial, a text that reads like the word stands in quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from harness.basics.printing import encodable

# pandas.read_csv takes the words null, None and NaN for missing values, but not this one.
NULL: Final = "none"
ABSENT: Final = object()  # of a trial that does not have the field
NOTHING = "absent"  # how figures and tables show that


def column(values: Sequence[Any]) -> np.ndarray:
    """One array [n] for the values of a field in `n` trials, each a value, None for null, or `ABSENT`."""
    present = [value for value in values if value is not None and value is not ABSENT]
    has_null = any(value is None for value in values)
    if any(not isinstance(value, (bool, int, float)) for value in present):
        return np.array([_text(value, has_null) for value in values], dtype=str)
    if has_null:
        levels = np.empty(len(values), dtype=object)
        levels[:] = [NULL if value is None else np.nan if value is ABSENT else value for value in values]
        return levels
    if len(present) == len(values) and len({type(value) for value in present}) == 1:
        return np.array(values)
    return np.array([np.nan if value is ABSENT else value for value in values], dtype=float)


def _text(value: Any, has_null: bool) -> str:
    if value is None or value is ABSENT:
        return NULL if value is None else ""
    text = parameter(value if isinstance(value, str) else json.dumps(value), has_null)
    return str(encodable(text.replace("\0", r"\x00")))  # numpy drops zeros at the end


def parameter(value: Any, has_null: bool) -> Any:
    """A value of a field with the word for null; a text that reads like it is quoted, if the field `has_null`."""
    if value is None:
        return NULL
    return f"'{value}'" if has_null and isinstance(value, str) and value.strip("'") == NULL else value


def varies(values: np.ndarray) -> bool:
    """Whether trials differ in a field; that some have null there and others do not have it is no difference."""
    if values.dtype.kind == "O":
        values = numbers(values)
    return len(pd.unique(values)) > 1


def is_set(values: np.ndarray) -> bool:
    """Whether some trial has the field, and is not null there."""
    if values.dtype.kind == "U":
        return bool((values != "").any())  # nulls alone are no texts
    return bool((~np.isnan(numbers(values))).any())


def numbers(values: Any) -> np.ndarray:
    """The values of a numeric field as float64.

    Args:
        values: [n], as a coordinate of `open_sweep` has them.

    Returns:
        [n]: NaN for null, and where a trial does not have the field.
    """
    values = np.array([*values], dtype=object) if isinstance(values, Sequence) else np.asarray(values)
    if values.dtype.kind != "O":
        as_floats: np.ndarray = values.astype(float)
        return as_floats
    return np.array([np.nan if isinstance(value, str) else value for value in values], dtype=float)


def in_order(values: Any) -> list[Any]:
    """The different levels of a field: numbers ascending, texts, null, and last NaN if some trials do not have it."""
    return list(pd.factorize(np.asarray(values), sort=True, use_na_sentinel=False)[1])


def word(value: Any) -> str:
    """A level as figures and tables show it."""
    if isinstance(value, (bool, np.bool_)):
        return str(value)
    if isinstance(value, (int, float)):
        return NOTHING if value != value else f"{value:g}"
    return str(value) or NOTHING


def overrides(words: str | Mapping[str, Any]) -> str:
    """Overrides of a command line, or values by key, as figures and tables show them: `optim.clip=none`."""
    if not isinstance(words, str):
        words = " ".join(f"{key}={value if isinstance(value, str) else f'{value:.4g}'}" for key, value in words.items())
    return re.sub(r"(?<==)null(?!\S)", NULL, words)


def texts(values: np.ndarray) -> np.ndarray:
    """A column of objects as texts, for files that have one type a column: numbers with all digits, "" if absent."""
    return np.array(["" if value != value else str(value) for value in values.tolist()], dtype=object)


def is_level(values: Any, level: Any) -> np.ndarray:
    """Which trials have that level [n]; NaN is the one of those that do not have the field."""
    values = np.asarray(values)
    return np.asarray(pd.isna(values) if level != level else values == level)
