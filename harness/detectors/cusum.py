"""Page's cumulative sums of robust deviations of the loss, and single large ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import nextafter

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, STRUCTURAL, choice, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length
from harness.detectors.windows import MAD_TO_STD, standardised

BELOW = nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Options:
    """`detect.cusum.*`."""

    limit: float = number(PER_TRIAL, 6.0, "sum that is an alarm (h)", above=0)
    slack: float = number(PER_TRIAL, 1.0, "deviations a step that are none (k)", low=0)
    sigma: float = number(PER_TRIAL, 3.5, "a single deviation that is an alarm", above=0)
    window: int = length(200, "steps of which the median is taken")
    least: int = length(30, "steps before it says anything", low=3)
    sides: str = choice(STRUCTURAL, "both", "whether a loss that falls is a drift, too", "both", "up")


class Cusum(Windowed):
    """The sum of z - k, kept at 0 or above, and below by symmetry; z = (loss - median) / (1.4826 MAD).

    A sum at its limit begins both anew, and every loss enters the window, as published. A loss that falls steadily is a
    drift to it; `sides=up` is not. The score is the larger sum over its limit, or the deviation over its own.
    """

    is_at_limit = True  # a sum; a deviation is one above its limit

    source = "trainscope 1.8.1, detectors/changepoint.py and z_score.py (robust)"
    falling = "its sums are taken to both sides, and the median lags behind"
    learns_alarms = True

    def remember(self) -> None:
        super().remember()
        self._up, self._down = self.number("up"), self.number("down")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        median, mad = self.windows["loss"].median_mad()
        z = self.heard(self.options.least, standardised(values["loss"], median, MAD_TO_STD * mad))
        slack = self.numbers["slack"]
        self._sums = (self._up.used + z - slack).clamp(min=0), (self._down.used - z - slack).clamp(min=0)
        both = self.options.sides == "both"
        largest = torch.maximum(*self._sums) if both else self._sums[0]
        single = z.abs() if both else z
        self._is_full = largest >= self.numbers["limit"]
        far = single / self.numbers["sigma"]
        far = torch.where(single > self.numbers["sigma"], far, far.clamp(max=BELOW))
        return torch.maximum(largest / self.numbers["limit"], far), torch.ones_like(z)

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        for kept, moved in zip((self._up.used, self._down.used), self._sums, strict=True):
            kept.copy_(torch.where(where_R, torch.where(self._is_full | moved.isnan(), 0.0, moved), kept))
        self.learn(values, where_R)

    def restart(self, where_R: Tensor) -> None:
        super().restart(where_R)
        for kept in (self._up.used, self._down.used):
            kept.masked_fill_(where_R, 0)
