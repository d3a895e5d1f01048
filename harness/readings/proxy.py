"""What a policy is trained on where that is a learned reward."""

from __future__ import annotations

from harness.config import Trial
from harness.policy.step_measures import PROXY_TAP
from harness.readings.base import PolicyReading, ReadingSignal


class ProxyReading(PolicyReading):
    """Of the last rollout; the gold reward of it is the signal `quality`."""

    tap = PROXY_TAP
    help = "the learned reward of a policy, and how well it still agrees with the gold one"
    signals = {
        "proxy": ReadingSignal((), "1", "mean learned reward of completions"),
        "proxy_correlation": ReadingSignal((), "1", "correlation of learned and gold reward over a rollout"),
    }

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        return "policy.proxy=null has no learned reward" if trial.section("policy").proxy is None else ""
