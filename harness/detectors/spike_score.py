"""Standard deviations from a rolling average, to both sides."""

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
    """`detect.spike_score.*`."""

    sigma: float = number(PER_TRIAL, 7.0, "standard deviations from the mean that are an alarm", above=0)
    window: int = length(1000, "steps of which mean and deviation are taken")
    least: int = length(128, "steps before it says anything; the paper names none", low=3)


class SpikeScore(Windowed):
    """The larger of abs(x - mean) / std of the loss and of the gradient norm: that of the paper's spike score.

    What was an alarm enters the window: the score there is taken over all steps of a run.
    """

    watches = ("loss", "grad_norm")
    learns_alarms = True
    is_at_limit = True
    source = "OLMo 2, arXiv 2501.00656, section 3"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        scores = [standardised(values[name], *window.mean_std()).abs() for name, window in self.windows.items()]
        return self.heard(self.options.least, torch.stack(scores).amax(0)), self.numbers["sigma"]
