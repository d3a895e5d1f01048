"""Attention logits that grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.attention_growth.*`."""

    growth: float = number(
        PER_TRIAL, 2.0, "multiple of the median of a layer's last readings that is an alarm", above=1
    )
    limit: float = number(PER_TRIAL, 1e4, "largest logit that is an alarm whatever was before", above=0)
    window: int = length(20, "readings of which the median is taken", low=2)


class AttentionGrowth(Windowed):
    """The largest attention logit of a layer over twice the median of its last 20 readings, or over 1e4.

    A median below 1 counts as 1: such logits make no difference to a softmax. The score is that of the worst layer,
    with its limit at 1. Silent until half of the window is filled, but for the limit of 1e4. Logits grow in every run,
    so what was an alarm is learned, or it would be one for ever.
    """

    watches = ("loss", "attention_logit_max")
    windowed = ("attention_logit_max",)
    learns_alarms = True
    source = "logits above 1e4 are divergence in Wortsman et al. 2023, arXiv 2309.14322; the rate of growth is ours"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        logit = values["attention_logit_max"]
        median, _ = self.windows["attention_logit_max"].median_mad()
        growth = (logit / median.clamp(min=1)).amax(1) / self.numbers["growth"]
        heard = self.heard(self.options.window // 2, growth)
        size = logit.amax(1) / self.numbers["limit"]
        return torch.fmax(heard, torch.where(size > 1, size, heard)), torch.ones_like(size)
