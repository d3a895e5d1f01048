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

    def judge(self, values: Mapping[str, Tensor], is_new: Tensor) -> tuple[Tensor, Tensor]:
        loss, norm = (values[name].float() for name in self.watches)  # as stored: what it cannot hold is infinite
        is_finite = loss.isfinite() & norm.isfinite()
        return is_new & ~is_finite, torch.full_like(loss, torch.nan, dtype=torch.float64)
