"""Standard deviations above the mean of the last steps, of the loss and of the gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Values, Windowed
from harness.detectors.options import length
from harness.detectors.windows import standardised


@dataclass(frozen=True)
class Options:
    """`detect.skip_step.*`."""

    sigma: float = number(PER_TRIAL, 6.0, "standard deviations above the mean that are an alarm", above=0)
    window: int = length(128, "steps of which mean and deviation are taken")


class SkipStep(Windowed):
    """The larger of (x - mean) / std of the loss and of the gradient norm; silent until x fills half of the window.

    What was an alarm enters the window all the same, as it does there.
    """

    watches = ("loss", "grad_norm")
    learns_alarms = True
    source = "OLMo-core, optim/skip_step_optimizer.py; Levanter and MaxText have the same constants"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        scores = [standardised(values[name], *window.mean_std()) for name, window in self.windows.items()]
        return self.heard(max(2, self.options.window // 2) - 1, torch.stack(scores).amax(0)), self.numbers["sigma"]
