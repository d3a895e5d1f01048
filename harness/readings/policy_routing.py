"""How often a policy's sampler and trainer send a token to different experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import ROUTES_TAP
from harness.readings.base import PolicyReading, ReadingContext, ReadingSignal, are_there, router_taps


class PolicyRoutingReading(PolicyReading):
    """Of all tokens of the last rollout, prompts too."""

    tap = ROUTES_TAP
    help = "share of tokens that a policy's sampler and trainer send to different experts"
    signals = {
        "routing_flips": ReadingSignal(
            ("layer",), "1", "share of tokens whose experts differ between sampler and trainer"
        ),
    }

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._is_there = torch.tensor(are_there(known.trial, router_taps(self.depth)), device=known.device)

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        mixer = trial.section("block").channel_mixer
        return "" if mixer == "moe" else f"block.channel_mixer={mixer} has no experts"

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {"routing_flips": torch.where(self._is_there, values[0][0, 0], torch.nan)}
