"""How many layers and ranks each trial of a sweep has; the rest of its signals is padding, where nothing was lost."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

OF_A_TRIAL = {"layer": "depth", "rank": "ranks"}  # dimension -> coordinate that says how many a trial has of it


@dataclass(frozen=True)
class Alike:
    """Trials of one shape: their places in the sweep, and how long each dimension of `OF_A_TRIAL` is for them."""

    trials: np.ndarray
    sizes: Mapping[Hashable, int]

    def of(self, values: np.ndarray, dims: Sequence[Hashable]) -> np.ndarray:
        """These trials' part of a signal of the sweep [trial, ...], without padding; `dims` are its dimensions."""
        return cut(values[self.trials], dims, self.sizes)

    def apart(self, is_so: np.ndarray) -> Iterator[Alike]:
        """Those of which something holds, and the others: of each kind that there is."""
        for kind in np.unique(is_so[self.trials]):
            yield Alike(self.trials[is_so[self.trials] == kind], self.sizes)


def alike(sweep: xr.Dataset) -> Iterator[Alike]:
    """The trials in groups of one shape."""
    sizes = own_sizes(sweep)
    shapes = np.stack([sizes[dim] for dim in OF_A_TRIAL], 1)
    for shape in np.unique(shapes, axis=0):
        places = np.flatnonzero((shapes == shape).all(axis=1))
        yield Alike(places, dict(zip(OF_A_TRIAL, map(int, shape), strict=True)))


def own_sizes(sweep: xr.Dataset) -> dict[str, np.ndarray]:
    """Dimension -> how long it is for each trial, [trial]: at least 1, which is what a model of one's own has."""
    found = {}
    for dim, coordinate in OF_A_TRIAL.items():
        most = max(1, sweep.sizes.get(dim, 1))
        if coordinate in sweep.coords and sweep[coordinate].dims == ("trial",):
            own = np.nan_to_num(sweep[coordinate].values.astype(float))
        else:  # not varied: all have what there is
            own = np.full(sweep.sizes["trial"], most, float)
        found[dim] = np.clip(own, 1, most).astype(int)
    return found


def cut(values: np.ndarray, dims: Sequence[Hashable], sizes: Mapping[Hashable, int]) -> np.ndarray:
    """A signal's values, of these dimensions, up to the `sizes` of the dimensions that have one."""
    return values[tuple(slice(sizes.get(dim)) for dim in dims)]
