"""How often a policy's sampler and trainer send a token to different experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import ROUTES_TAP
from harness.readings.base import ReadingSignal, TapReading
from harness.readings.rollouts import NO_POLICY


class PolicyRoutingReading(TapReading):
    """Of all tokens of the last rollout, prompts too."""

    cadence = 1
    help = "share of tokens that a policy's sampler and trainer send to different experts"
    signals = {
        "routing_flips": ReadingSignal(
            ("layer",), "1", "share of tokens whose experts differ between sampler and trainer"
        ),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [ROUTES_TAP]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        if trial.objective.name != "policy":
            return NO_POLICY.format(trial.objective.name)
        mixer = trial.section("block").channel_mixer
        return "" if mixer == "moe" else f"block.channel_mixer={mixer} has no experts"

    def measure(self, x: Tensor) -> Tensor:
        return x  # [r, n]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"routing_flips": values[0][0, 0]}
