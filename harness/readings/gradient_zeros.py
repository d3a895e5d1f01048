"""How much of each layer's gradient is exactly zero, as a narrow format leaves it that has flushed it away."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.readings.base import GradientReading, Groups, ReadingContext, shown_of_groups


class GradientZeros(GradientReading):
    """The share of a layer's gradient elements that are 0, after the mean over ranks and before clipping.

    In float32 it is next to none in a layer; in the embedding it is rows whose token the batch lacks. In fp16 it is
    what lies well below 6e-8, its least number, without loss scaling (Micikevicius et al. 2018, arXiv 1710.03740).
    """

    cadence = 0
    help = "share of each layer's gradient that is zero, of the embedding's and of the head's"
    signals = shown_of_groups("zero_gradients", "1", "share of elements of the gradient that are zero")

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        groups = Groups(known.layout, self.depth)
        self._named = groups.named
        ends = [span.stop for span in known.layout.spans]
        starts = [span.start for span in known.layout.spans]
        self._spans = [
            [(start, stop) for start, stop in zip(starts, ends, strict=True) if _is_inside(start, ranges)]
            for ranges in groups.ranges
        ]

    def read(self, gradients_RxP: Tensor) -> Mapping[str, Tensor]:
        rows, shares = len(gradients_RxP), []
        for spans in self._spans:
            zeros = torch.zeros(rows, dtype=torch.float64, device=gradients_RxP.device)
            for start, stop in spans:
                is_zero = (gradients_RxP[:, start:stop] == 0).to(torch.uint8)
                zeros += is_zero.sum(1, dtype=torch.int32)
            shares.append(zeros / sum(stop - start for start, stop in spans) if spans else zeros + torch.nan)
        return self._named("zero_gradients", torch.stack(shares, 1))


def _is_inside(start: int, ranges: list[tuple[int, int]]) -> bool:
    return any(first <= start < end for first, end in ranges)
