"""Where Adam's epsilon, and not the second moment, decides how large a step is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.config import Trial
from harness.optim.optimizers.base import Optimizer
from harness.readings.base import ReadingSignal, StepReading, no_second_moment, second_share


class AdamFloor(StepReading):
    """The share of elements with sqrt(v_hat) < eps, v_hat the second moment with its bias corrected.

    Rows of the embedding whose token has not come for long are among them. `eps` is that of the tensor, as muP and
    CompleteP scale it. Of all tensors together.
    """

    cadence = 0
    help = "share of elements at Adam's epsilon"
    signals = {
        "epsilon_share": ReadingSignal(
            (), "1", "share of elements whose corrected second moment is below Adam's epsilon squared"
        )
    }

    @classmethod
    def missing(cls, trial: Trial) -> str:
        return no_second_moment(trial)

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        moment, layout = optimizer.slot("moment_2"), self.known.layout
        correction = second_share(optimizer)
        total = torch.zeros(len(moment), dtype=torch.float64, device=moment.device)
        for span in layout.spans:
            limit = (optimizer.hyperparameter("eps") * span.epsilon).square() * correction
            is_low = (moment[:, span.start : span.stop] < limit.to(moment.dtype)).to(torch.uint8)
            total += is_low.sum(1, dtype=torch.int32)
        return {"epsilon_share": total / layout.elements}
