"""What each layer makes of the size of the residual stream, on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.readings.base import ReadingSignal, TapReading, each_log, mean_of_calls, residual_taps, rms


class ResidualGain(TapReading):
    """log of RMS of a layer's output over RMS of its input, of each data-parallel rank's part of the batch.

    Ranks have the same weights and other tokens, so one that computes otherwise shows.
    """

    cadence = 10
    help = "log gain of the residual stream in each layer on each rank"
    signals = {
        "residual_gain": ReadingSignal(
            ("layer", "rank"), "1", "log of the root mean square of a block's output over its input's"
        )
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return ["embedding", *residual_taps(depth)]

    measure = staticmethod(rms)

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        sizes = torch.stack([mean_of_calls(of_tap.square()) for of_tap in values])  # [layers + 1, ranks, R]
        gains = (sizes[1:] / sizes[:-1]).permute(2, 0, 1).contiguous()
        return {"residual_gain": each_log(gains) / 2}
