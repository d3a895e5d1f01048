"""What a policy samples, and how it is rewarded."""

from __future__ import annotations

from harness.policy.step_measures import ROLLOUT_TAP
from harness.readings.base import PolicyReading, ReadingSignal


class RolloutReading(PolicyReading):
    """Of the last rollout of a policy, and the constant of its penalty as it is in this step."""

    tap = ROLLOUT_TAP
    help = "rewards of a policy, its distance from the reference and from the sampler, its variety"
    signals = {
        "quality": ReadingSignal((), "1", "mean quality of completions"),
        "reward_spread": ReadingSignal((), "1", "standard deviation of rewards"),
        "zero_spread": ReadingSignal((), "1", "share of groups whose rewards are all equal"),
        "reference_kl": ReadingSignal((), "nat", "KL of a completion to the reference (k1)"),
        "reference_kl_k3": ReadingSignal((), "nat", "KL of a completion to the reference (k3)"),
        "token_entropy": ReadingSignal((), "nat", "entropy of a token"),
        "mismatch": ReadingSignal((), "nat", "KL of sampler to trainer, of a token"),
        "mismatch_max": ReadingSignal((), "nat", "largest difference of log p between sampler and trainer"),
        "completion_length": ReadingSignal((), "tokens", "length of a completion"),
        "distinct": ReadingSignal((), "1", "share of completions that are new in their group"),
        "repeated": ReadingSignal((), "1", "share of pairs of tokens that a completion repeats"),
        "penalty": ReadingSignal((), "1", "constant of the KL penalty"),
    }
