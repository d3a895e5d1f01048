"""How large Adam's moments are, beside what a gradient could have left there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.config import Trial
from harness.optim.optimizers.adamw import falls_short
from harness.optim.optimizers.base import Optimizer
from harness.readings.base import ReadingContext, ReadingSignal, StepReading, no_second_moment, second_share


class MomentSize(StepReading):
    """The largest corrected first moment, and root of the corrected second, of any element over its tensor's bound.

    The bound is sqrt(fan-in), with a tensor's last axis for its fan-in: an element of a linear layer's gradient is
    sum_n delta_n x_n over the tokens n of the batch; of normalised inputs no |x_n| is above sqrt(fan-in), and the
    head's deltas, 1/N of the difference of two probabilities each, sum to 1 at most: so N, the batch, drops out.
    """

    cadence = 10
    help = "largest first and second moment of Adam over sqrt(fan-in)"
    signals = {
        "moment_1_size": ReadingSignal((), "1", "largest corrected first moment over the root of its fan-in"),
        "moment_2_size": ReadingSignal(
            (), "1", "root of the largest corrected second moment over the root of its fan-in"
        ),
    }

    @classmethod
    def missing(cls, trial: Trial) -> str:
        return no_second_moment(trial)

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        layout = known.layout
        ends = [layout.offsets[scaled.name] for scaled in layout.tensors[1:]] + [layout.size]
        self._ranges: list[tuple[int, int, int]] = []  # neighbours of one fan-in, with the zeros between them
        for scaled, end in zip(layout.tensors, ends, strict=True):
            fan_in, start = scaled.shape[-1], layout.offsets[scaled.name]
            if self._ranges and self._ranges[-1][2] == fan_in:
                start = self._ranges.pop()[0]
            self._ranges.append((start, end, fan_in))

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        rest1 = falls_short(optimizer.hyperparameter("beta1"), optimizer.updates.double()[:, None])[:, 0]
        rest2 = second_share(optimizer)[:, 0]
        first, second = optimizer.slot("moment_1"), optimizer.slot("moment_2")
        ones, twos = [], []
        for start, stop, fan_in in self._ranges:
            here = first[:, start:stop]
            ones.append(torch.maximum(here.amax(1), -here.amin(1)).double() / fan_in**0.5)
            twos.append(second[:, start:stop].amax(1).double() / fan_in)
        largest = torch.stack(ones, 1).amax(1).abs() / rest1  # of zeros alone, the sign goes by where they lie
        return {"moment_1_size": largest, "moment_2_size": (torch.stack(twos, 1).amax(1) / rest2).sqrt()}
