"""What is not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.detectors.base import Detector


class Finite(Detector):
    """An alarm where the loss or the gradient norm is NaN or infinite, and nowhere else: what every trainer has."""

    watches = ("loss", "grad_norm")
    source = "every trainer"
    blind = "a jump is finite"

    def score(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        silent = torch.full_like(values["loss"], torch.nan)
        return silent, silent
