"""How a router spreads tokens over experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.model import sums
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks


class ExpertLoads(TapReading):
    """The largest share of a layer's tokens that one expert takes, and how far the loads of its experts differ.

    The share is 1 where all tokens go to one, and K / E where K experts a token are used evenly. The spread is the
    standard deviation of the loads over their mean, 0 where they are even.
    """

    of_some_layers = True
    cadence = 1
    help = "how a router spreads tokens over experts"
    signals = {
        "expert_share": ReadingSignal(("layer",), "1", "largest share of a layer's tokens that one expert takes"),
        "expert_spread": ReadingSignal(("layer",), "1", "standard deviation of the experts' loads over their mean"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.moe.loads" for layer in range(depth)]

    def measure(self, x: Tensor) -> Tensor:
        return x.double()  # [r, E]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        loads = torch.stack([mean_of_ranks(of_layer) for of_layer in values], 1)  # [R, L, E]
        mean = sums.mean(loads)
        spread = sums.mean((loads - mean[..., None]).square()).sqrt()
        return {"expert_share": loads.amax(-1), "expert_spread": spread / mean}
