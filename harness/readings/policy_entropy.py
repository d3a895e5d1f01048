"""How strongly a policy's entropy is asked for, where that adapts."""

from __future__ import annotations

from harness.config import Trial
from harness.policy.step_measures import ENTROPY_TAP
from harness.readings.base import PolicyReading, ReadingSignal


class PolicyEntropyReading(PolicyReading):
    """The constant of the bonus on entropy as it is in force in this step."""

    tap = ENTROPY_TAP
    help = "constant of a bonus on entropy that adapts"
    signals = {
        "entropy_constant": ReadingSignal((), "1", "constant of the bonus on entropy"),
    }

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        return "" if trial.section("policy").entropy_target is not None else "policy.entropy_target=null adapts nothing"
