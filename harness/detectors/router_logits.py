"""Router logits that grow."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Growth
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.router_logits.*`."""

    growth: float = number(
        PER_TRIAL, 2.0, "multiple of the median of a layer's last readings that is an alarm", above=1
    )
    limit: float = number(PER_TRIAL, 1e4, "largest logit that is an alarm whatever was before", above=0)
    window: int = length(20, "readings of which the median is taken", low=2)


class RouterLogits(Growth):
    """The largest router logit of a layer over twice the median of its last 20 readings, or over 1e4.

    A median below 1 counts as 1: such logits hardly choose.
    """

    watches = ("loss", "router_logit_max")
    windowed = ("router_logit_max",)
    least = 1.0
    source = "ours; that large router logits go before instability is of ST-MoE, Zoph et al. 2022, arXiv 2202.08906"
