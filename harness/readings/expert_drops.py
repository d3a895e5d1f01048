"""How much finds no room in its expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks


class ExpertDrops(TapReading):
    """The share of a layer's assignments of a token to an expert that are dropped, with `moe.capacity`."""

    of_some_layers = True
    cadence = 1
    help = "how much finds no room in its expert"
    signals = {"expert_dropped": ReadingSignal(("layer",), "1", "share of assignments that find no room")}

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.moe.dropped" for layer in range(depth)]

    def measure(self, x: Tensor) -> Tensor:
        return x.double()  # [r, 1]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"expert_dropped": torch.stack([mean_of_ranks(of_layer)[:, 0] for of_layer in values], 1)}
