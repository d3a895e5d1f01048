"""The loss on text that a policy trains on beside its completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import TEXT_TAP
from harness.readings.base import ReadingSignal, TapReading, mean_of_ranks
from harness.readings.rollouts import NO_POLICY


class PolicyTextReading(TapReading):
    """Of the training text that `policy.mix_in` adds to a step."""

    cadence = 1
    help = "next-token loss on the text that a policy trains on beside its completions"
    signals = {
        "text_loss": ReadingSignal((), "nat", "next-token loss on mixed-in text"),
    }

    @classmethod
    def taps(cls, depth: int) -> Sequence[str]:
        return [TEXT_TAP]

    @classmethod
    def missing(cls, trial: Trial) -> str:
        if trial.objective.name != "policy":
            return NO_POLICY.format(trial.objective.name)
        return "" if trial.section("policy").mix_in is not None else "policy.mix_in=null mixes in no text"

    def measure(self, x: Tensor) -> Tensor:
        return x  # [r, n]

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"text_loss": mean_of_ranks(values[0])[:, 0]}
