"""A detector of one file: the loss on a control chart of exponential means."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.ewma_chart.*`."""

    sigma: float = number(PER_TRIAL, 6.0, "deviations above the mean that are an alarm", above=0)
    share: float = number(PER_TRIAL, 0.05, "weight of the last loss in mean and variance", above=0, high=1)
    least: int = number(PER_TRIAL, 20, "losses before it says anything", low=2)


class EwmaChart(Detector):
    """(loss - m) / s, with m an exponential mean of the loss, and s^2 one of its squared distance from m."""

    source = "MacGregor and Harris 1993, Journal of Quality Technology 25(2); its limits are ours"

    def remember(self) -> None:
        self._mean, self._variance, self._count = self.number("mean"), self.number("variance"), self.number("count")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        off = values["loss"] - self._mean.used
        score = torch.where(off == 0, 0.0, off / self._variance.used.sqrt())
        return torch.where(self._count.used >= self.numbers["least"], score, torch.nan), self.numbers["sigma"]

    def learn(self, values: Values, where_R: Tensor) -> None:
        share, loss = self.numbers["share"], values["loss"]
        mean, variance, count = self._mean.used, self._variance.used, self._count.used
        is_first = count == 0
        off = torch.where(is_first, 0.0, loss - mean)
        mean.copy_(torch.where(where_R, torch.where(is_first, loss, mean + share * off), mean))
        variance.copy_(torch.where(where_R, (1 - share) * (variance + share * off.square()), variance))
        count.add_(where_R)

    def restart(self, where_R: Tensor) -> None:
        for kept in (self._mean.used, self._variance.used, self._count.used):
            kept.masked_fill_(where_R, 0)
