"""What the loss of a sweep is, and in which unit: an objective may have another one than nat/token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import xarray as xr

from harness.objectives.outcome import LOSSES, TRAINING_LOSS

USUAL_NAME = TRAINING_LOSS[0]


def loss_attributes(trials: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """`units` and `long_name` of the loss of trials with these configurations; those of all, where they differ."""
    found = list(dict.fromkeys(LOSSES.get(_objective(trial), TRAINING_LOSS) for trial in trials)) or [TRAINING_LOSS]
    names, units = (" or ".join(dict.fromkeys(words)) for words in zip(*found, strict=True))
    return {"units": units, "long_name": names}


def _objective(trial: Mapping[str, Any]) -> str:
    section = trial.get("objective")
    return str(section.get("name")) if isinstance(section, Mapping) else ""


def loss_name(sweep: xr.Dataset) -> str:
    """What the loss is."""
    return str(sweep["loss"].attrs["long_name"])


def final_name(sweep: xr.Dataset) -> str:
    """What `final_loss` is."""
    name = loss_name(sweep)
    return "final training loss" if name == USUAL_NAME else f"{name} at the end"


def unit(sweep: xr.Dataset) -> str:
    """The unit of the loss, such as nat/token; "" for none."""
    units = str(sweep["loss"].attrs["units"])
    return "" if units == "1" else units


def with_unit(sweep: xr.Dataset, words: str, before: str = " ") -> str:
    """Words for a loss, or for a difference of losses, with its unit in brackets if it has one."""
    return f"{words}{before}[{unit(sweep)}]" if unit(sweep) else words
