"""Activations that are much larger than all others of the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.readings.base import ReadingSignal, TapReading, residual_taps


class MassiveActivations(TapReading):
    """Largest size of an element of each layer's output over their median size, in the batch of all ranks.

    Sun et al. 2024 (arXiv 2402.17762, section 2) call an activation massive that is above 100, and about 1,000 times
    the median. Medians, of two middle ones the lower, are of what passes at once, and the largest quotient counts.
    Infinite where most are zero.
    """

    cadence = 0
    help = "largest activation of each layer's output over the median one"
    signals = {
        "massive_activation": ReadingSignal(("layer",), "1", "largest size of the block's output over its median")
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return residual_taps(depth)

    def measure(self, x: Tensor) -> Tensor:
        ordered = x.abs().flatten(1).sort(1).values.double()  # a median is not deterministic on every device
        return ordered[:, -1] / ordered[:, (ordered.shape[1] - 1) // 2]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"massive_activation": torch.stack([of_layer.flatten(0, 1).amax(0) for of_layer in values], 1)}
