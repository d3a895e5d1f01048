"""A multiple of the largest of the first losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.spiky_loss.*`."""

    factor: float = number(PER_TRIAL, 10.0, "multiple of the largest of the first losses that is an alarm", above=0)
    samples: int = number(PER_TRIAL, 100, "how many first losses", low=1)


class SpikyLoss(Detector):
    """The size of the loss over the largest of the first 100; silent until then."""

    is_at_limit = True
    reach = {"factor": 2.0}
    keeps = "the first losses of a run are those before it went back, too"
    source = "Megatron-LM, core/rerun_state_machine.py, is_unexpectedly_large"

    def remember(self) -> None:
        self._count, self._largest = self.number("count"), self.number("largest")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        largest = self._largest.used
        ratio = torch.where(largest == 0, torch.inf, values["loss"].abs() / largest)
        return torch.where(self._count.used >= self.numbers["samples"], ratio, torch.nan), self.numbers["factor"]

    def learn(self, values: Values, where_R: Tensor) -> None:
        is_first = where_R & (self._count.used < self.numbers["samples"])
        self._count.used.add_(is_first)
        larger = torch.maximum(self._largest.used, values["loss"].abs())
        self._largest.used.copy_(torch.where(is_first, larger, self._largest.used))
