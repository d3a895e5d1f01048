"""How well a policy's critic knows what completions are worth."""

from __future__ import annotations

from harness.config import Trial
from harness.policy.step_measures import VALUE_TAP
from harness.readings.base import PolicyReading, ReadingSignal


class PolicyValueReading(PolicyReading):
    """Of every step on a rollout; the share of variance that is explained has its mean over ranks and micro-batches."""

    tap = VALUE_TAP
    is_of_steps = True
    help = "loss of a policy's critic, and how much of the returns it explains"
    signals = {
        "value_loss": ReadingSignal((), "1", "loss of the critic, times its weight"),
        "value_clip_share": ReadingSignal((), "1", "share of values that are clipped"),
        "value_explained": ReadingSignal((), "1", "share of the variance of returns that values explain"),
    }

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        return "" if trial.section("policy").critic else "policy.critic=false has no values"
