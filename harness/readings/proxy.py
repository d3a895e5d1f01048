"""What a policy is trained on where that is a learned reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import PROXY_TAP
from harness.readings.base import ReadingSignal, TapReading
from harness.readings.rollouts import NO_POLICY


class ProxyReading(TapReading):
    """Of the last rollout; the gold reward of it is the signal `quality`."""

    cadence = 1
    help = "the learned reward of a policy, and how well it still agrees with the gold one"
    signals = {
        "proxy": ReadingSignal((), "1", "mean learned reward of completions"),
        "proxy_correlation": ReadingSignal((), "1", "correlation of learned and gold reward over a rollout"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [PROXY_TAP]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        if trial.objective.name != "policy":
            return NO_POLICY.format(trial.objective.name)
        return "policy.proxy=null has no learned reward" if trial.section("policy").proxy is None else ""

    def measure(self, x: Tensor) -> Tensor:
        return x  # [r, 2]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return dict(zip(self.signals, values[0][0, 0].unbind(1), strict=True))
