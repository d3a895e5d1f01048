"""The loss on text that a policy trains on beside its completions."""

from __future__ import annotations

from harness.config import Trial
from harness.policy.step_measures import TEXT_TAP
from harness.readings.base import PolicyReading, ReadingSignal


class PolicyTextReading(PolicyReading):
    """Of the training text that `policy.mix_in` adds to a step."""

    tap = TEXT_TAP
    is_of_steps = True
    help = "next-token loss on the text that a policy trains on beside its completions"
    signals = {
        "text_loss": ReadingSignal((), "nat", "next-token loss on mixed-in text"),
    }

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        return "" if trial.section("policy").mix_in is not None else "policy.mix_in=null mixes in no text"
