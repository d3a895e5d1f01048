"""A loss over its exponential mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.loss_ratio.*`."""

    ratio: float = number(PER_TRIAL, 1.5, "loss over its exponential mean that is an alarm", above=1)
    span: float = number(PER_TRIAL, 9.0, "span of the mean in steps: each has the weight 2 / (span + 1)", low=1)


class LossRatio(Detector):
    """The loss over its exponential mean, which begins with the first loss and takes in no spike."""

    source = "metaseq, trainer.py, skip_spike; its limit is a run's own, and 1.5 is ours"

    def remember(self) -> None:
        self._mean = self.number("mean", torch.nan)

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        return values["loss"] / self._mean.used, self.numbers["ratio"]

    def learn(self, values: Values, where_R: Tensor) -> None:
        share, mean, loss = 2 / (self.numbers["span"] + 1), self._mean.used, values["loss"]
        moved = torch.where(mean.isnan(), loss, (1 - share) * mean + share * loss)
        mean.copy_(torch.where(where_R, moved, mean))

    def restart(self, where_R: Tensor) -> None:
        self._mean.used.masked_fill_(where_R, torch.nan)
