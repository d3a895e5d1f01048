"""How much of each layer's gradient is exactly zero, as a narrow format leaves it that has flushed it away."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.readings.base import GradientReading, Groups, ReadingContext, group_of, shown_of_groups


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
        self._groups = Groups(known.layout, self.depth)
        self._spans: list[list[slice]] = [[] for _ in self._groups.ranges]
        for scaled, span in zip(known.layout.tensors, known.layout.spans, strict=True):  # without what lies between
            self._spans[group_of(scaled.name, self.depth)].append(slice(span.start, span.stop))

    def read(self, gradients_RxP: Tensor) -> Mapping[str, Tensor]:
        shares = []
        for spans in self._spans:
            zeros = torch.zeros(len(gradients_RxP), dtype=torch.float64, device=gradients_RxP.device)
            for span in spans:
                zeros += (gradients_RxP[:, span] == 0).to(torch.uint8).sum(1, dtype=torch.int32)
            elements = sum(span.stop - span.start for span in spans)
            shares.append(zeros / elements if elements else zeros + torch.nan)
        return self._groups.named("zero_gradients", torch.stack(shares, 1))
