"""A policy that loses its variety."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Collapse
from harness.detectors.options import fall, length


@dataclass(frozen=True)
class Options:
    """`detect.policy_entropy.*`."""

    fall: float = fall()
    floor: float = number(PER_TRIAL, 0.05, "nat of a token below which a policy has collapsed", low=0)
    window: int = length(20, "steps of which the median is taken", low=2)


class PolicyEntropy(Collapse):
    """The median of the last 20 entropies of a token over twice that of now; or one below 0.05 nat.

    The score has its limit at 1. Silent until half of the window is filled, but for the floor. Entropies of policies
    fall as they learn, so what was an alarm is learned.
    """

    watches = ("loss", "token_entropy")
    windowed = ("token_entropy",)
    blind = "an entropy that rises is no collapse"
    source = "Cui et al. 2025, arXiv 2505.22617, who name no limit: fall and floor are ours"
