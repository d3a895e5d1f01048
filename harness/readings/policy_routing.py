"""How often a policy's sampler and trainer send a token to different experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.policy.step_measures import ROUTES_TAP
from harness.readings.base import PolicyReading, ReadingSignal


class PolicyRoutingReading(PolicyReading):
    """Of all tokens of the last rollout, prompts too."""

    tap = ROUTES_TAP
    help = "share of tokens that a policy's sampler and trainer send to different experts"
    signals = {
        "routing_flips": ReadingSignal(
            ("layer",), "1", "share of tokens whose experts differ between sampler and trainer"
        ),
    }

    @classmethod
    def lacks(cls, trial: Trial) -> str:
        mixer = trial.section("block").channel_mixer
        return "" if mixer == "moe" else f"block.channel_mixer={mixer} has no experts"

    def joined(self, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        trial = self.known.trial
        dense = trial.section("moe").dense_first  # blocks without experts, which come first
        is_there = torch.arange(trial.model.depth, device=values[0].device) >= dense
        return {"routing_flips": torch.where(is_there, values[0][0, 0], torch.nan)}
