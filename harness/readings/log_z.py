"""The logarithm of the softmax's denominator at the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.model import sums
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks


class LogZ(TapReading):
    """log sum exp of the logits, the mean over tokens: what z-loss holds at 0 (PaLM, arXiv 2204.02311, section 5)."""

    cadence = 20
    help = "log Z of the output"
    signals = {"output_log_z": ReadingSignal((), "nat", "log Z of the output, mean over tokens")}

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return ["logits"]

    def measure(self, x: Tensor) -> Tensor:
        # A logit less its log-softmax; exp and log on their own would round by where they stand.
        return sums.mean((x[..., 0] - torch.log_softmax(x, -1)[..., 0]).double())

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"output_log_z": mean_of_ranks(values[0])}
