"""What incidents, checkpoints and logging cost, with every assumption as an argument."""

from __future__ import annotations

import math


def seen_share(lead: float, every: float) -> float:
    """How often a sign that leads by so many steps is logged before the spike, with one log in `every` steps."""
    return min(1.0, lead / every)


def lost_steps(every: float, latency: float = 0.0) -> float:
    """Steps lost at a failure, on average, with a checkpoint `every` so many: half of them, and the latency."""
    return every / 2 + latency


def step_seconds(parameters: float, tokens: float, devices: float, flops: float) -> float:
    """Time of one step: 6 operations a parameter and token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1)."""
    return 6 * parameters * tokens / (devices * flops)


def money(steps: float, seconds: float, devices: float, per_hour: float) -> float:
    """The price of so many steps of `seconds` each on `devices`, at a price for a device and hour."""
    return steps * seconds / 3600 * devices * per_hour


def checkpoint_interval(write: float, between_failures: float) -> float:
    """The time between checkpoints that loses least: sqrt(2 x time of a write x mean time between failures).

    Of first order, for writes that are short beside both (Young 1974, doi 10.1145/361147.361115). All in one unit.
    """
    return math.sqrt(2 * write * between_failures)


def checkpoint_share(write: float, between_failures: float, every: float) -> float:
    """The share of time that goes into checkpoints `every` so long, and into what a failure has undone."""
    return write / every + every / (2 * between_failures)
