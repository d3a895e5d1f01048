"""What detectors know of a run beside what they watch: its schedule, and of a user's loop when it began anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

RATE, BEGAN, JUDGED = "scheduled_rate", "began_anew", "judged"
NAMES = (RATE, BEGAN, JUDGED)
UPDATE, PER_RATE = "update_rms", "update_per_rate"
STEP = "step"  # its number
SOURCES: Mapping[str, Sequence[str]] = {PER_RATE: (UPDATE, RATE), STEP: ()}  # of what no store has, of what it is made
CHANGED = 0.05  # by so much of itself a rate changes in a step where the schedule is no smooth curve


def stored(watches: Sequence[str]) -> list[str]:
    """The signals of a store that are needed for these."""
    return [name for signal in watches for name in SOURCES.get(signal, (signal,))]


@dataclass(frozen=True)
class LoopSignals:
    """Of each row and step of a user's loop, [R, steps]: whether detectors began anew there, and judge it."""

    began: np.ndarray
    judged: np.ndarray

    @classmethod
    def of(cls, signals: Mapping[str, np.ndarray]) -> LoopSignals | None:
        """From what is stored; None where nothing of a user's loop is."""
        if BEGAN not in signals or JUDGED not in signals:
            return None
        return cls(signals[BEGAN] == 1, ~(signals[JUDGED] == 0))


def new_rates(signals: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Where the step before, which is judged now, had another rate than the schedule let expect, [R, steps]."""
    if RATE not in signals:
        return None
    rates = np.asarray(signals[RATE]).astype(np.float32).astype(np.float64)
    padded = np.concatenate([np.full((len(rates), 3), np.nan), rates[:, :-1]], 1)
    is_new: np.ndarray = has_new_rate(padded[:, 2:], padded[:, 1:-1], padded[:, :-2])
    return is_new


def has_new_rate(now: Any, before: Any, earlier: Any) -> Any:
    """Whether a scheduled rate is neither the one before nor on the curve of the last two, each to a twentieth.

    So a warm-up and a cosine are smooth but for their ends; a rate that falls by steps, or begins anew, is not. Of
    float64 tensors, arrays or numbers of NumPy, as they come.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        moved = abs(now - before) > CHANGED * abs(before)  # False where one is NaN
        return moved & ~(abs(now * earlier - before * before) <= CHANGED * (before * before))


def since_measured(values: np.ndarray) -> np.ndarray:
    """A signal [R, steps] with 0, which says nothing, in place of the NaN before its first number.

    Not every optimizer keeps second moments, and one that steps late has none before that.
    """
    is_known = np.logical_or.accumulate(~np.isnan(values), axis=1)
    return np.where(is_known, values, np.float32(0))


def per_rate(update: Any, rate: Any) -> Any:
    """The size of an update as a multiple of the scheduled rate; where none is known, as it is.

    So a schedule that ends at zero is no alarm, and a wrong rate is. Of float64 tensors, arrays or numbers of NumPy, as
    they come, with values that float32 has, since the store's are.
    """
    library: Any = torch if isinstance(update, Tensor) else np
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        multiple = library.where(rate > 0, update / rate, 0.0 * update)
    return library.where(rate != rate, update, multiple)


def with_sources(signals: Mapping[str, Any]) -> dict[str, Any]:
    """Signals, float32, and what is made of them, where all that it is made of is there."""
    if UPDATE not in signals or RATE not in signals:
        return dict(signals)
    update, rate = (np.asarray(signals[name]).astype(np.float32).astype(np.float64) for name in (UPDATE, RATE))
    with np.errstate(over="ignore"):
        return {**signals, PER_RATE: per_rate(update, rate).astype(np.float32)}
