"""Moments of Adam that no gradient can have left there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.fields import PER_TRIAL, number
from harness.detectors.base import Detector, Values


@dataclass(frozen=True)
class Options:
    """`detect.moment_bound.*`."""

    limit: float = number(PER_TRIAL, 10.0, "multiple of the bound that is an alarm", above=0)


class MomentBound(Detector):
    """The larger of Adam's corrected first moment and the root of its second over sqrt(fan-in); of the step before.

    For a mean over the batch of normalised inputs and deltas that sum to 1 (harness/readings/moment_size.py). It
    remembers nothing.
    """

    watches = ("loss", "moment_1_size", "moment_2_size")
    reach = {"limit": 5.0}
    source = "after He et al., ISCA 2023, doi 10.1145/3579371.3589105; this bound and its limit are ours"

    def score(self, values: Values) -> tuple[Tensor, Tensor]:
        return torch.maximum(values["moment_1_size"], values["moment_2_size"]), self.numbers["limit"]
