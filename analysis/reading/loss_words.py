"""What the loss of a sweep is, and in which unit: an objective may have another one than nat/token."""

from __future__ import annotations

from collections.abc import Iterable

import xarray as xr

from harness.storage.store import SIGNALS
from harness.storage.stored import PackInfo

USUAL = SIGNALS["loss"]
USUAL_NAME = USUAL.long_name


def loss_attributes(packs: Iterable[PackInfo]) -> dict[str, str]:
    """`units` and `long_name` of the loss of these packs; those of all, where they differ."""
    found = [pack.arrays["loss"]["attributes"] for pack in packs] or [
        {"units": USUAL.units, "long_name": USUAL.long_name}
    ]
    return {key: " or ".join(dict.fromkeys(one[key] for one in found)) for key in ("units", "long_name")}


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
