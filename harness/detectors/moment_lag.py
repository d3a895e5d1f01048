"""A gradient that the second moment has not expected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.moment_lag.*`."""

    limit: float = number(PER_TRIAL, 2.3, "RMS of gradient over root of the second moment that is an alarm", above=1)
    least: int = number(PER_TRIAL, 30, "steps before it says anything", low=0)


class MomentLagDetector(Detector):
    """RMS of the embedding's gradient over the root of its second moment at 2.3 or more; of the step before.

    Of the first layer, as published, where it comes 1 to 8 steps before a spike of the loss. Silent in the first 30
    steps (there 1,000 of 20,000). No value is above 1 / sqrt(1 - beta2): 4.5 at 0.95, and 31.6 at 0.999. There the
    first layer reads patches of an image; of an embedding most rows have no gradient in a step, which lowers it.
    """

    watches = ("loss", "embedding_moment_lag")
    is_at_limit = True
    reach = {"limit": 5.0}
    of_zero = "a lag of 2.3 is an alarm, a steady one too"
    source = "Wortsman et al. 2023, arXiv 2304.13013, section 3.4; the steps that are silent are ours"

    def remember(self) -> None:
        self._count = self.number("count")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        is_heard = self._count.used >= self.numbers["least"]
        return torch.where(is_heard, values["embedding_moment_lag"], torch.nan), self.numbers["limit"]

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        self._count.used.add_(where_R)

    def restart(self, where_R: Tensor) -> None:
        self._count.used.masked_fill_(where_R, 0)
