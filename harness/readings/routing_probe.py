"""How many tokens of a fixed batch a step sends to other experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.config import Trial
from harness.model import sums
from harness.readings.base import ProbeReading, ReadingContext, ReadingSignal, are_there, router_taps


class RoutingProbe(ProbeReading):
    """Of the batch of step 0, as its router chooses with the weights as a step begins and when it is over.

    So what changes is the model alone, and not the text. A token counts where any of its experts is another one. A bias
    on scores (`moe.bias_rate`) is that of after the step in both.
    """

    cadence = 0  # two passes more are a fifth of a step, or more
    of_some_layers = True
    waits = True  # its model is made anew each time
    help = "how many tokens of a fixed batch a step sends to other experts"
    signals = {
        "probe_flips": ReadingSignal(("layer",), "1", "share of a fixed batch's tokens whose experts a step changes")
    }

    @classmethod
    def missing(cls, trial: Trial) -> str:
        if not any(cls.layers(trial)):
            return f"block.channel_mixer={trial.section('block').channel_mixer} has no experts"
        name = trial.objective.name
        return "" if name == "next_token" else f"objective.name={name} has no text to send"

    @classmethod
    def layers(cls, trial: Trial) -> list[bool]:
        return are_there(trial, router_taps(trial.model.depth))

    def __init__(self, known: ReadingContext):
        super().__init__(known)
        self._is_there = torch.tensor(self.layers(known.trial), device=known.device)

    def compared(self, before_RxLxNxK: Tensor, after_RxLxNxK: Tensor) -> Mapping[str, Tensor]:
        differs = before_RxLxNxK.sort(-1).values != after_RxLxNxK.sort(-1).values
        return {"probe_flips": torch.where(self._is_there, sums.mean(differs.any(-1).double()), torch.nan)}
