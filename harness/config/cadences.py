"""`signals.*`: how often each reading is taken, a field for each file of harness/readings/."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from harness.basics import plugins
from harness.config.fields import STRUCTURAL, number


@cache
def signals() -> type:
    """The section: a dataclass with a number of steps for each reading."""
    readings: dict[str, Any] = plugins.subclasses("readings", object)
    fields = [
        (name, int, number(STRUCTURAL, cls.cadence, f"steps from one reading to the next, 0: none; {cls.help}", low=0))
        for name, cls in readings.items()
        if hasattr(cls, "cadence")
    ]
    made = dataclasses.make_dataclass("Signals", fields, frozen=True)
    made.__module__, made.__doc__ = __name__, "`signals.*`: what is read beside the loss, and how often."
    return made


def __getattr__(name: str) -> Any:
    """Where pickle looks for the class of a section."""
    if name == "Signals":
        return signals()
    raise AttributeError(f"module {__name__} has no {name}")
