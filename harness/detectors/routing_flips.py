"""A router that sends far more tokens elsewhere than it did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Growth, Values
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.routing_flips.*`."""

    growth: float = number(
        PER_TRIAL, 4.0, "multiple of the median of a layer's last readings that is an alarm", above=1
    )
    limit: float = number(
        PER_TRIAL, 1.0, "share of tokens beyond which it is an alarm whatever was before; 1: none", above=0, high=1
    )
    window: int = length(20, "readings of which the median is taken", low=2)


class RoutingFlips(Growth):
    """The share of a fixed batch's tokens that a step sends elsewhere, over 4 times the median of a layer's last 20.

    A median below 0.1 counts as that: two fifths of the tokens or less are no alarm. What was looked at when this was
    chosen, and what it says elsewhere, is in docs/howto/moe.md.
    """

    watches = ("loss", "probe_flips")
    windowed = ("probe_flips",)
    least = 0.1
    source = (
        "ours; OLMoE, Muennighoff et al. 2024, arXiv 2409.02060, section 5.1, has router saturation by such a share"
    )
    blind = "a share is 1 at most"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        flips = values["probe_flips"]
        return super().score({**values, "probe_flips": torch.where(flips <= 1, flips, torch.nan)})  # more is no share
