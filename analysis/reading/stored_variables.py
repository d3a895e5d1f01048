"""The signals of a sweep, one array each over all packs, whose values are read when they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import dask.array
import numpy as np
import xarray as xr

from harness.storage.json_seal import SEAL
from harness.storage.pack_info import CHECKSUMS, PENDING
from harness.storage.store import ENDS, SIGNALS
from harness.storage.stored import PackInfo, is_once, read_signal

CHUNK_BYTES = 2 * 2**20
KEPT = {"complete", "steps_done", CHECKSUMS, PENDING, SEAL}  # what reading a chunk asks of a pack


def stored_variables(packs: Sequence[PackInfo], rows: Sequence[tuple[int, int]]) -> dict[str, xr.Variable]:
    """Every signal of the trials, by name; `rows`: (number of the pack, row in it) of each, pack by pack."""
    owned = {number: np.array([row for _, row in pairs]) for number, pairs in groupby(rows, key=itemgetter(0))}
    # Without the attributes, the largest part of what was read.
    slim = {
        number: {key: packs[number].attributes[key] for key in KEPT & packs[number].attributes.keys()}
        for number in owned
    }
    kept = [dataclasses.replace(packs[number], attributes=attributes) for number, attributes in slim.items()]
    descriptions: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        name: (signal.dims, {"units": signal.units, "long_name": signal.long_name})
        for name, signal in (SIGNALS | ENDS).items()
    }
    sizes = {"trial": len(rows), "step": 0, "layer": 0, "segment": 0}
    for pack in kept:
        for name, array in pack.arrays.items():
            descriptions.setdefault(name, (tuple(array["dimension_names"]), array["attributes"]))
            for dim, size in zip(array["dimension_names"], array["shape"], strict=True):
                sizes[dim] = sizes[dim] if dim == "trial" else max(sizes.get(dim, 0), size)
    variables = {}
    for name, (dims, attributes) in descriptions.items():
        shape = tuple(sizes[dim] for dim in dims)
        values = StoredVariable(name, shape, kept, [*owned.values()])
        lazy = dask.array.from_array(values, chunks=values.chunks(), name=False, meta=np.empty((0,) * len(dims), "f4"))
        variables[name] = xr.Variable(dims, lazy, attributes)
    return variables


class StoredVariable:
    """One signal of all packs as one array [trials, steps(, layers)], of which only what is asked for is read."""

    dtype = np.dtype("float32")

    def __init__(self, name: str, shape: tuple[int, ...], packs: Sequence[PackInfo], rows: Sequence[np.ndarray]):
        """`rows` holds, for each pack, which of its trials are wanted."""
        self.name, self.shape, self.packs, self.rows = name, shape, packs, rows
        self.ndim = len(shape)
        self.ends = np.cumsum([len(part) for part in rows], dtype=int)

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Dask's chunks: whole packs and all steps, many packs in one where they are small."""
        row_bytes = self.dtype.itemsize * int(np.prod(self.shape[1:]))
        lengths = [0]
        for part in self.rows:
            if lengths[-1] and (lengths[-1] + len(part)) * row_bytes > CHUNK_BYTES:
                lengths.append(0)
            lengths[-1] += len(part)
        return tuple(lengths), *((size,) for size in self.shape[1:])

    def __getitem__(self, key: Any) -> np.ndarray:
        """Integers, slices and lists, each along its own axis."""
        key = key if isinstance(key, tuple) else (key,)
        key += (slice(None),) * (self.ndim - len(key))
        wanted = [np.arange(size)[part] for size, part in zip(self.shape, key, strict=True)]
        trials = np.atleast_1d(wanted[0])
        spans = [slice(int(np.min(w)), int(np.max(w)) + 1) if np.size(w) else slice(0, 0) for w in wanted[1:]]
        values = np.full((len(trials), *(span.stop - span.start for span in spans)), np.nan, self.dtype)
        owners = np.searchsorted(self.ends, trials, side="right")
        for number in np.unique(owners):
            pack, pack_rows, is_in_pack = self.packs[number], self.rows[number], owners == number
            if self.name not in pack.arrays:
                continue
            rows = pack_rows[trials[is_in_pack] - (self.ends[number] - len(pack_rows))]
            # A slice that ends beyond the pack's own steps or layers gives what there is, as in numpy.
            steps, *layers = spans
            is_whole = pack.complete or is_once(pack.arrays[self.name])
            # A block that is being written may have some of its signals: it counts once the attributes say so.
            stop = steps.stop if is_whole else min(steps.stop, pack.attributes["steps_done"])
            part = read_signal(pack, self.name, steps.start, stop)[rows][(slice(None), slice(None), *layers)]
            inside = tuple(slice(0, size) for size in part.shape[1:])
            values[(is_in_pack, *inside)] = part
        for axis in range(self.ndim - 1, 0, -1):
            values = np.take(values, wanted[axis] - spans[axis - 1].start, axis)
        return values[0] if np.ndim(wanted[0]) == 0 else values
