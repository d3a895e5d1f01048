"""Zarr v3 metadata as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

METADATA = "zarr.json"


def group_metadata(attributes: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The metadata of a group; with `arrays` (name -> metadata) it is consolidated."""
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    if arrays is not None:
        group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": arrays}
    return group


def array_metadata(
    shape: tuple[int, ...], chunk: tuple[int, ...], dims: tuple[str, ...], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a float32 array of chunks, each with its checksum, that is NaN where it has none.

    They are as JSON gives them back, with lists and no tuples.
    """
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        # The separator "." keeps an array's chunks in one folder.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "dimension_names": list(dims),
        "attributes": attributes,
        "storage_transformers": [],
    }


def chunk_key(block: int, dims: int) -> str:
    """The file of block `block` along axis 1 of an array of `dims` axes, the others of which are one chunk each."""
    return ".".join(["c", "0", str(block), *["0"] * (dims - 2)])


def strict_json(value: Any) -> str:
    """JSON as its standard has it, without spaces; numpy's numbers as Python's, NaN and infinity as Zarr spells them.

    Raises TypeError for what JSON cannot hold.
    """
    options: dict[str, Any] = {"allow_nan": False, "separators": (",", ":")}
    try:
        return json.dumps(value, default=_plain, **options)
    except (TypeError, ValueError):  # numbers that are not finite; going through everything takes far longer
        return json.dumps(_plain(value), **options)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
