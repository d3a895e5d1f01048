"""What detectors know of a loop of the user's own that no trial of ours needs: its schedule, and when it began anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

RATE, BEGAN, JUDGED = "scheduled_rate", "began_anew", "judged"
NAMES = (RATE, BEGAN, JUDGED)
CHANGED = 0.05  # of a rate from one step to the next, from which on a trend of the weights is no measure


@dataclass(frozen=True)
class LoopSignals:
    """Of each row and step, [R, steps]: whether detectors began anew there, judge it, and have another rate to see.

    The size of an update is judged at the step after it, and so is a rate.
    """

    began: np.ndarray
    judged: np.ndarray
    has_new_rate: np.ndarray

    @classmethod
    def of(cls, signals: Mapping[str, np.ndarray]) -> LoopSignals | None:
        """From what is stored; None where nothing of a user's loop is."""
        if any(name not in signals for name in NAMES):
            return None
        rates = np.asarray(signals[RATE], np.float32)
        before, earlier = np.full_like(rates, np.nan), np.full_like(rates, np.nan)
        before[:, 1:], earlier[:, 2:] = rates[:, :-1], rates[:, :-2]
        return cls(signals[BEGAN] == 1, ~(signals[JUDGED] == 0), is_new_rate(before, earlier))


def is_new_rate(now: Any, before: Any) -> Any:
    """Whether one scheduled rate is another than the one before, by more than a smooth schedule changes in a step."""
    now, before = np.asarray(now, np.float64), np.asarray(before, np.float64)
    return np.abs(now - before) > CHANGED * np.abs(before)  # False where one is NaN


def since_measured(values: np.ndarray) -> np.ndarray:
    """A signal [R, steps] with 0, which says nothing, in place of the NaN before its first number.

    Not every optimizer keeps second moments, and one that steps late has none before that.
    """
    is_known = np.logical_or.accumulate(~np.isnan(values), axis=1)
    return np.where(is_known, values, np.float32(0))


def of_schedule(signals: Mapping[str, Any]) -> dict[str, Any]:
    """Signals, float32, as detectors see them: the size of an update as a multiple of the scheduled rate.

    So a schedule that ends at zero is no alarm, and a wrong rate is. Where no schedule is known they are as stored.
    """
    if "update_rms" not in signals or RATE not in signals:
        return dict(signals)
    update, rate = np.asarray(signals["update_rms"], np.float64), np.asarray(signals[RATE], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        multiple = np.where(np.isnan(rate), update, np.where(rate > 0, update / rate, 0.0 * update))
    return {**signals, "update_rms": multiple.astype(np.float32)}
