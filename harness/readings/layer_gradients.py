"""Gradient norms of the layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from harness.readings.base import GradientReading, Groups, ReadingContext, shown_of_groups


class LayerGradients(GradientReading):
    """L2 norm before clipping: of each layer, of what stands in front of them, and behind them."""

    cadence = 10
    help = "gradient norm of each layer, of the embedding and of the head"
    signals = shown_of_groups("grad_norm", "1", "gradient norm before clipping")

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._groups = Groups(known.layout, self.depth)

    def read(self, gradients_RxP: Tensor) -> Mapping[str, Tensor]:
        return self._groups.named("grad_norm", self._groups.norms(gradients_RxP))
