"""Where the first non-finite value of each trial came from, as coordinates along `trial`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

FIELDS: Mapping[str, tuple[type, str]] = {
    "step": (float, "step of the first non-finite value"),
    "direction": (str, "pass that made it: forward, backward, or update, at the end of the step"),
    "site": (str, "site of the step at which it stands"),
    "tensor": (str, "tensor or tap that holds it"),
    "layer": (float, "block of that tensor"),
    "head": (float, "head of attention to which the element belongs"),
    "index": (str, "index of the element"),
    "rank": (float, "data-parallel rank whose pass it was"),
    "value": (str, "nan, inf or -inf"),
    "operation": (str, "operation of torch that made it of finite numbers"),
    "cause": (str, "strike, overflow, 0/0, inf - inf, invalid, or unknown"),
    "format": (str, "number format of the operation's result"),
    "blamed": (str, "tensor or tap to blame, inferred from values alone"),
    "blamed_site": (str, "site at which that went wrong"),
    "blamed_index": (str, "index of its element"),
    "evidence": (str, "re-execution, state, setting, outlier, or unknown"),
}
"""By its name in a record: what a number is, or a word, and its name in words."""
PREFIX = "provenance_"
NAMES = tuple(PREFIX + name for name in FIELDS)
UNITS = {"step": "step", "layer": "layer"}


def provenance_variables(records: Sequence[Mapping[str, Any]]) -> dict[str, xr.Variable]:
    """`provenance_FIELD` [trial] of each record, which is empty for a trial without a non-finite value.

    What a record lacks is NaN among numbers and "" among words; an index is a JSON list.
    """
    variables = {}
    for name, (kind, text) in FIELDS.items():
        values = [_value(record.get(name), kind) for record in records]
        units = {"units": UNITS.get(name, "1")} if kind is float else {}
        variables[PREFIX + name] = xr.Variable("trial", np.array(values, dtype=kind), {"long_name": text} | units)
    return variables


def _value(value: Any, kind: type) -> Any:
    if value is None:
        return np.nan if kind is float else ""
    return json.dumps(value) if isinstance(value, list) else value
