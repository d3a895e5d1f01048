"""A gradient norm above a fixed number."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.grad_norm_skip.*`."""

    limit: float = number(PER_TRIAL, 3.0e38, "global gradient norm before clipping above which is an alarm", above=0)


class GradNormSkip(Detector):
    """The gradient norm itself, before clipping, against a limit that a run has to name."""

    watches = ("grad_norm",)
    reach = {"limit": 5.0}
    source = "Megatron-LM, --grad-norm-skip-threshold"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        return values["grad_norm"], self.numbers["limit"]
