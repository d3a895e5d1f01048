"""A policy that has moved too far since it sampled what it trains on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.policy_kl.*`."""

    target: float = number(PER_TRIAL, 0.01, "KL of a token since the rollout that is wanted, nat", above=0)
    factor: float = number(PER_TRIAL, 1.5, "multiple of it that is an alarm", above=0)


class PolicyKl(Detector):
    """The KL of a token from the policy of the rollout to that of now, over 1.5 times 0.01 nat.

    With `skip` it is the early stopping of PPO: the other steps on that rollout are not taken. It is 0 at the first
    step on a rollout, so it sees nothing where there is one (`policy.updates`=1).
    """

    watches = ("loss", "step_kl")
    learns_alarms = True
    reach = {"target": 3.0}
    of_zero = "a KL of 3 nat is an alarm, a steady one too"
    source = "OpenAI's Spinning Up, PPO, target_kl and 1.5 times it; Stable-Baselines3 has the same rule"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        score = values["step_kl"] / self.numbers["target"]
        return score, self.numbers["factor"].expand_as(score)
