"""Attention that collapses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, STRUCTURAL, number
from harness.detectors.base import Values, Windowed

LOW = 2.0  # score of what is below the floor


@dataclass(frozen=True)
class Options:
    """`detect.entropy_collapse.*`."""

    fall: float = number(
        PER_TRIAL, 2.0, "multiple of a reading at which the median of those before is an alarm", above=1
    )
    floor: float = number(PER_TRIAL, 0.01, "nats below which attention has collapsed, whatever was before", low=0)
    window: int = number(STRUCTURAL, 20, "readings of which the median is taken", low=2, high=10_000)


class EntropyCollapse(Windowed):
    """The median of a layer's last 20 attention entropies over twice the entropy now; or one below 0.01 nat.

    The score is that of the worst layer, with its limit at 1. Silent until half of the window is filled, but for the
    floor. Entropies fall in every run as heads specialise, so what was an alarm is learned.
    """

    watches = ("loss", "attention_entropy")
    learns_alarms = True
    blind = "an entropy that rises is no collapse"
    source = "Zhai et al. 2023, arXiv 2303.06296, who name no limit: fall and floor are ours"

    def remember(self) -> None:
        self.windows = {"attention_entropy": self.window("attention_entropy", self.options.window)}

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        now = values["attention_entropy"]
        median, _ = self.windows["attention_entropy"].median_mad()
        fall = self.heard(self.options.window // 2, (median / now).amax(1) / self.numbers["fall"])
        is_low = now.amin(1) < self.numbers["floor"]
        return torch.where(is_low, torch.fmax(fall, torch.full_like(fall, LOW)), fall), torch.ones_like(fall)
