"""What a policy samples, and how it is rewarded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.policy.measures import MEASURES
from harness.policy.step_measures import ROLLOUT_TAP
from harness.readings.base import ReadingSignal, TapReading

NO_POLICY = "objective.name={} samples nothing"
COLUMNS = (*MEASURES, "penalty")


class RolloutReading(TapReading):
    """Of the last rollout of a policy, and the constant of its penalty as it is in this step."""

    cadence = 1
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

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [ROLLOUT_TAP]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        return "" if trial.objective.name == "policy" else NO_POLICY.format(trial.objective.name)

    def measure(self, x: Tensor) -> Tensor:
        return x  # [r, n]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return dict(zip(COLUMNS, values[0][0, 0].unbind(1), strict=True))
