"""A signal along the steps of a trial, as a page draws it: thinned so that neither a spike nor a hole is lost."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_HOLES = 50


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """The steps of `values` [steps] that are drawn: all with a finite value, or about `most` of them.

    Of each of `most` / 2 equal parts of the run these are the smallest and the largest value, besides the first and the
    last of all.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) <= most:
        return known
    parts = known * (most // 2) // len(values)
    ends = np.flatnonzero(np.diff(parts)) + 1
    kept = [known[0], known[-1]]
    for part in np.split(known, ends):
        kept += [part[values[part].argmin()], part[values[part].argmax()]]
    return np.unique(kept)


def holes(values: np.ndarray, has_every_step: bool) -> list[list[Any]]:
    """Where `values` [steps] are not finite: [first step, last step, word], at most 50 of them.

    A signal that is not measured at every step has NaN in between, so there infinities alone are holes.
    """
    kinds = np.where(np.isposinf(values), 1, np.where(np.isneginf(values), 2, 0))
    if has_every_step:
        kinds[np.isnan(values)] = 3
    words = ("", "Infinity", "-Infinity", "NaN")
    begins = np.flatnonzero(np.diff(kinds, prepend=-1))  # none of no values
    ends = np.append(begins[1:], len(values))[: len(begins)] - 1
    found = [(int(a), int(b), words[kinds[a]]) for a, b in zip(begins, ends, strict=True) if kinds[a]]
    return [list(hole) for hole in found[:MOST_HOLES]]


def curve(values: np.ndarray, most: int, has_every_step: bool = False) -> dict[str, Any]:
    """`x` (steps; null where they are 0, 1, 2, ...), `y`, `holes`, and `of`, how many finite values there are.

    A value is the shortest decimal number that is this float of the store.
    """
    steps = thinned(values, most)
    is_plain = len(steps) > 0 and steps[-1] == len(steps) - 1
    return {
        "x": None if is_plain else steps.tolist(),
        "y": [float(text) for text in values[steps].astype(str)],
        "holes": holes(values, has_every_step),
        "of": int(np.isfinite(values).sum()),
    }


def largest(values: np.ndarray) -> np.ndarray:
    """[R, steps] of a signal [R, steps(, layers(, ranks))] without padding: each step's largest, or NaN."""
    return values if values.ndim == 2 else values.max(axis=tuple(range(2, values.ndim)))
