"""Activations that grow outliers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, STRUCTURAL, choice, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length
from harness.detectors.windows import MAD_TO_STD, standardised


@dataclass(frozen=True)
class Options:
    """`detect.kurtosis.*`."""

    sigma: float = number(PER_TRIAL, 3.0, "robust deviations above the median that count", above=0)
    persist: int = number(PER_TRIAL, 3, "readings in a row for which they have to count", low=1)
    window: int = length(40, "readings of which the median is taken")
    baseline: str = choice(STRUCTURAL, "first", "the first readings, or the last that were usual", "first", "last")


class KurtosisDetector(Windowed):
    """(k - median) / (1.4826 MAD) of a layer's kurtosis above a limit for three readings in a row.

    Median and MAD are those of the first 40 readings, as published, until which it is silent. Kurtosis changes in every
    run, so `baseline=last`, which is ours, takes the last 40 in which nothing counted. The score is that of the worst
    layer, and 0 while it does not persist.
    """

    watches = ("loss", "activation_kurtosis")
    windowed = ("activation_kurtosis",)
    source = "trainscope 1.8.1, analysis.py, first_crossing_step"

    def remember(self) -> None:
        super().remember()
        self._streak = self.number("streak")

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        median, mad = self.windows["activation_kurtosis"].median_mad()
        worst = standardised(values["activation_kurtosis"], median, MAD_TO_STD * mad).amax(1)
        self._off = self.heard(self.options.window, worst)
        persists = self._streak.used + 1 >= self.numbers["persist"]
        return torch.where(persists, self._off, self._off * 0), self.numbers["sigma"]

    def note(self, values: Values, where_R: Tensor, is_alarm: Tensor) -> None:
        counts = self._off > self.numbers["sigma"]
        streak = torch.where(counts, self._streak.used + 1, 0.0)
        self._streak.used.copy_(torch.where(where_R, streak, self._streak.used))
        learns = where_R & ~counts
        if self.options.baseline == "first":
            learns = where_R & (self.windows["activation_kurtosis"].count < self.options.window)
        self.learn(values, learns)

    def restart(self, where_R: Tensor) -> None:
        super().restart(where_R)
        self._streak.used.masked_fill_(where_R, 0)
