"""Fields that the options of several detectors have."""

from __future__ import annotations

from typing import Any

from harness.config.fields import PER_TRIAL, STRUCTURAL, number

LONGEST = 10_000  # steps or readings, which each row remembers


def length(value: int, taken: str, low: int = 4) -> Any:
    """How many steps or readings are looked at: the default, in words what for, and the fewest that are allowed."""
    return number(STRUCTURAL, value, taken, low=low, high=LONGEST)


def fall() -> Any:
    """By how much a reading may fall."""
    return number(PER_TRIAL, 2.0, "multiple of a reading at which the median of those before is an alarm", above=1)
