"""A loss far from the mean of the last ten."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.running_mean.*`."""

    rise: float = number(PER_TRIAL, 2.0, "distance from the mean, in means, that is an alarm", above=0)
    window: int = length(10, "steps of which the mean is taken", low=1)


class RunningMean(Windowed):
    """abs(loss - mean) over abs(mean), where the loss has risen since the last step that was no alarm.

    With its own 2.0 a loss has to be three times the mean.
    """

    is_at_limit = True
    reach = {"rise": 1.0}
    source = "Lightning, fabric/utilities/spike.py, SpikeDetection"

    def remember(self) -> None:
        super().remember()
        self._last = self.number("last")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        loss, mean = values["loss"], self.windows["loss"].mean()
        distance = torch.where(mean == 0, torch.inf, (loss - mean).abs() / mean.abs())
        return self.heard(1, torch.where(loss > self._last.used, distance, 0.0)), self.numbers["rise"]

    def learn(self, values: Values, where_R: Tensor) -> None:
        super().learn(values, where_R)
        self._last.used.copy_(torch.where(where_R, values["loss"], self._last.used))

    def restart(self, where_R: Tensor) -> None:
        super().restart(where_R)
        self._last.used.masked_fill_(where_R, 0)
