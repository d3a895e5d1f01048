"""Outliers in the residual stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.model.sums import powers
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks, residual_taps

ROUNDING = 1e-6


class Kurtosis(TapReading):
    """Excess kurtosis of each layer's output, over all its elements in the batch: 0 for normal ones, 0 without spread.

    As trainscope 1.8.1 (core/metrics.py) has it, here from the mean of x, x^2, x^3 and x^4.
    """

    cadence = 10
    help = "excess kurtosis of each layer's output"
    signals = {"activation_kurtosis": ReadingSignal(("layer",), "1", "excess kurtosis of the block's output")}

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return residual_taps(depth)

    def measure(self, x: Tensor) -> Tensor:
        flat = x.reshape(x.shape[0], -1)
        if not on_cpu(flat):
            return torch.stack([powers(flat, power) for power in (1, 2, 3, 4)], 1) / flat.shape[1]
        square = flat * flat
        sums = flat.sum(1), square.sum(1), (square * flat).sum(1), (square * square).sum(1)
        return torch.stack(sums, 1).double() / flat.shape[1]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        mean, second, third, fourth = torch.stack([mean_of_ranks(of_layer) for of_layer in values], 1).unbind(-1)
        variance = second - mean.square()
        about_mean = fourth - 4 * third * mean + 6 * second * mean.square() - 3 * mean.square().square()
        excess = about_mean / variance.square() - 3
        is_flat = variance <= ROUNDING * second  # all that is left is what float32 has rounded
        return {"activation_kurtosis": torch.where(is_flat, 0.0, excess)}
