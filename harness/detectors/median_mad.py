"""Robust deviations from the median, over several steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length
from harness.detectors.windows import MAD_TO_STD, standardised


@dataclass(frozen=True)
class Options:
    """`detect.median_mad.*`."""

    sigma: float = number(PER_TRIAL, 5.0, "robust deviations from the median that count", above=0)
    persist: int = number(PER_TRIAL, 3, "steps in a row for which they have to count", low=1)
    window: int = length(100, "steps of which the median is taken")


class MedianMad(Windowed):
    """abs(loss - median) / (1.4826 MAD) above a limit for three steps in a row.

    Silent until half of the window is filled. Steps that count do not enter the window. The score is that of this
    step, and 0 while it does not persist.
    """

    source = "K2-V2 report, which names neither limit, window nor number of steps: those are ours"

    def remember(self) -> None:
        super().remember()
        self._streak = self.number("streak")

    def _deviation(self, values: Values) -> Tensor:
        median, mad = self.windows["loss"].median_mad()
        return self.heard(self.options.window // 2, standardised(values["loss"], median, MAD_TO_STD * mad).abs())

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        self._off = self._deviation(values)
        persists = self._streak.used + 1 >= self.numbers["persist"]
        return torch.where(persists, self._off, self._off * 0), self.numbers["sigma"]

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        counts = self._off > self.numbers["sigma"]
        streak = torch.where(counts, self._streak.used + 1, 0.0)
        self._streak.used.copy_(torch.where(where_R, streak, self._streak.used))
        self.learn(values, where_R & ~counts)

    def restart(self, where_R: Tensor) -> None:
        super().restart(where_R)
        self._streak.used.masked_fill_(where_R, 0)
