"""How much older weights decide where tokens go, and what that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks


class StaleRoutes(TapReading):
    """Of each layer with `moe.lag` or frozen routing, by tokens and by assignments of a token to an expert.

    `stale_share` is 0 where no older choice is known, as in the first steps, or where no playbook has asked for one.
    """

    of_some_layers = True
    cadence = 1
    help = "how much older weights decide where tokens go"
    signals = {
        "stale_share": ReadingSignal(("layer",), "1", "share of a layer's tokens that older weights route"),
        "stale_differs": ReadingSignal(("layer",), "1", "share of assignments that current weights would not make"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.moe.stale" for layer in range(depth)]

    def measure(self, x: Tensor) -> Tensor:
        return x.double()  # [r, 2]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        means = torch.stack([mean_of_ranks(of_layer) for of_layer in values], 1)  # [R, L, 2]
        return {"stale_share": means[..., 0], "stale_differs": means[..., 1]}
