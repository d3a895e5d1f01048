"""A sampler that is not the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Growth
from harness.detectors.options import length


@dataclass(frozen=True)
class Options:
    """`detect.policy_mismatch.*`."""

    growth: float = number(PER_TRIAL, 5.0, "multiple of the median of the last steps that is an alarm", above=1)
    limit: float = number(PER_TRIAL, 1.0, "largest difference that is an alarm whatever was before, nat", above=0)
    window: int = length(20, "steps of which the median is taken", low=2)


class PolicyMismatch(Growth):
    """The largest difference of log p of a token between sampler and trainer: five times its median, or above 1 nat.

    A median below 0.001 nat counts as that. Where sampler and trainer are one it is 0. What was an alarm is learned.
    """

    watches = ("loss", "mismatch_max")
    windowed = ("mismatch_max",)
    least = 1e-3
    reach = {"growth": 2.0, "limit": 10.0}
    of_zero = "a difference of 3 nat is an alarm, a steady one too"
    source = "ours; that small mismatches end runs is of arXiv 2605.14220 and of Qi et al. 2025, arXiv 2510.26788"
