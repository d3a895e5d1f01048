"""How strongly a policy's entropy is asked for, where that adapts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import ENTROPY_TAP
from harness.readings.base import ReadingSignal, TapReading
from harness.readings.rollouts import NO_POLICY


class PolicyEntropyReading(TapReading):
    """The constant of the bonus on entropy as it is in force in this step."""

    cadence = 1
    help = "constant of a bonus on entropy that adapts"
    signals = {
        "entropy_constant": ReadingSignal((), "1", "constant of the bonus on entropy"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [ENTROPY_TAP]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        if trial.objective.name != "policy":
            return NO_POLICY.format(trial.objective.name)
        return "" if trial.section("policy").entropy_target is not None else "policy.entropy_target=null adapts nothing"

    def measure(self, x: Tensor) -> Tensor:
        return x  # [r, n]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"entropy_constant": values[0][0, 0, :, 0]}
