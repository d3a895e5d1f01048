"""A step that was named before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values
from harness.detectors.loop_signals import STEP


@dataclass(frozen=True)
class Options:
    """`detect.at_step.*`."""

    step: int = number(PER_TRIAL, 100, "step at which it is an alarm", low=0)


class AtStep(Detector):
    """An alarm at one step, whatever is seen there: for a rung of a playbook that acts at a fixed time.

    Where the run goes back beyond it and comes there again, it is an alarm again.
    """

    watches = (STEP,)
    blind = "it looks at nothing"
    source = "ours"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        is_it = values[STEP] == self.numbers["step"]
        return is_it.double(), torch.full_like(values[STEP], 0.5)
