"""Attention that collapses."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Collapse
from harness.detectors.options import fall, length


@dataclass(frozen=True)
class Options:
    """`detect.entropy_collapse.*`."""

    fall: float = fall()
    floor: float = number(PER_TRIAL, 0.01, "nats below which attention has collapsed, whatever was before", low=0)
    window: int = length(20, "readings of which the median is taken", low=2)


class EntropyCollapse(Collapse):
    """The median of a layer's last 20 attention entropies over twice the entropy now; or one below 0.01 nat.

    The score is that of the worst layer, with its limit at 1. Silent until half of the window is filled, but for the
    floor. Entropies fall in every run as heads specialise, so what was an alarm is learned.
    """

    watches = ("loss", "attention_entropy")
    windowed = ("attention_entropy",)
    blind = "an entropy that rises is no collapse"
    source = "Zhai et al. 2023, arXiv 2303.06296, who name no limit: fall and floor are ours"
