"""How a router spreads tokens over experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks


class ExpertLoads(TapReading):
    """The largest share of a layer's tokens that one expert takes: 1 where all go to it.

    With K experts a token it is K / E where they are used evenly.
    """

    cadence = 1
    help = "how a router spreads tokens over experts"
    signals = {
        "expert_share": ReadingSignal(("layer",), "1", "largest share of a layer's tokens that one expert takes")
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.moe.loads" for layer in range(depth)]

    def measure(self, x: Tensor) -> Tensor:
        return x.double()  # [r, E]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"expert_share": torch.stack([mean_of_ranks(of_layer).amax(-1) for of_layer in values], 1)}
