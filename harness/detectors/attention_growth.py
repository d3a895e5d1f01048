"""Attention logits that grow."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Growth
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.attention_growth.*`."""

    growth: float = number(
        PER_TRIAL, 2.0, "multiple of the median of a layer's last readings that is an alarm", above=1
    )
    limit: float = number(PER_TRIAL, 1e4, "largest logit that is an alarm whatever was before", above=0)
    window: int = length(20, "readings of which the median is taken", low=2)


class AttentionGrowth(Growth):
    """The largest attention logit of a layer over twice the median of its last 20 readings, or over 1e4.

    A median below 1 counts as 1: such logits make no difference to a softmax.
    """

    watches = ("loss", "attention_logit_max")
    windowed = ("attention_logit_max",)
    least = 1.0
    source = "logits above 1e4 are divergence in Wortsman et al. 2023, arXiv 2309.14322; the rate of growth is ours"
