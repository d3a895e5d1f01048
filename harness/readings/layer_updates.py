"""How far a step moves each layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.optim.optimizers.base import Optimizer
from harness.readings.base import Groups, ReadingContext, StepReading, shown_of_groups


class LayerUpdates(StepReading):
    """RMS of the weights' change over RMS of the weights before it; NaN where those are 0.

    The change is all that happens to the weights in a step, a strike there included.
    """

    cadence = 10
    compares = True
    help = "update-to-weight ratio of each layer, of the embedding and of the head"
    signals = shown_of_groups("update_ratio", "1", "root mean square of the change over that of the weights")

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._groups = Groups(known.layout, self.depth)

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        assert before_RxP is not None
        weights, change = self._groups.norms(before_RxP), self._groups.norms_of_change(before_RxP, optimizer.weights)
        return self._groups.named("update_ratio", torch.where(weights > 0, change / weights, torch.nan))
