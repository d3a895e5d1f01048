"""How well a policy's critic knows what completions are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import VALUE_MEASURES, VALUE_TAP
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks
from harness.readings.rollouts import NO_POLICY


class PolicyValueReading(TapReading):
    """Of every step on a rollout; the share of variance that is explained has its mean over ranks and micro-batches."""

    cadence = 1
    help = "loss of a policy's critic, and how much of the returns it explains"
    signals = {
        "value_loss": ReadingSignal((), "1", "loss of the critic, times its weight"),
        "value_clip_share": ReadingSignal((), "1", "share of values that are clipped"),
        "value_explained": ReadingSignal((), "1", "share of the variance of returns that values explain"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [VALUE_TAP]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        if trial.objective.name != "policy":
            return NO_POLICY.format(trial.objective.name)
        return "" if trial.section("policy").critic else "policy.critic=false has no values"

    def measure(self, x: Tensor) -> Tensor:
        return x  # [r, n]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return dict(zip(VALUE_MEASURES, mean_of_ranks(values[0]).unbind(1), strict=True))
