"""How large the numbers are that experts give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.readings.base import ReadingSignal, TapReading


class ExpertOutputs(TapReading):
    """Of each layer the largest element and the largest root mean square that one of its experts gives.

    Before router weights, over the tokens that it was given; an expert without tokens gives nothing.
    """

    of_some_layers = True
    cadence = 10
    help = "how large the numbers are that experts give"
    signals = {
        "expert_output_max": ReadingSignal(("layer",), "1", "largest element, by size, of what an expert gives"),
        "expert_output_rms": ReadingSignal(("layer",), "1", "largest root mean square of what one expert gives"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [f"blocks.{layer}.moe.outputs" for layer in range(depth)]

    def measure(self, x: Tensor) -> Tensor:
        return x.double()  # [r, E, 2]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        largest = torch.stack([of_layer.flatten(0, 1).amax((0, 2)) for of_layer in values], 1)  # [R, L, 2]
        return {"expert_output_max": largest[..., 0], "expert_output_rms": largest[..., 1]}
