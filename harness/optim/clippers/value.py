"""Clipping by value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.optim.clippers.base import Clipper


class ByValue(Clipper):
    """`optim.clip_value`: each element of a gradient held in [-bound, bound] (Mikolov 2012, in arXiv 1211.5063).

    As torch.nn.utils.clip_grad_value_: what is infinite becomes the bound, and NaN stays NaN.
    """

    part = "optim.clip_value"
    order = 10
    needs_norm = False
    repairs_infinity = True

    def bind(self, trials: Sequence[Trial]) -> None:
        self._bound = self.column(trials, lambda trial: trial.optim.clip_value)
        self._bounds = self._bound.tolist()

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        acted = active_R & (torch.linalg.vector_norm(gradients_RxP, torch.inf, dim=1) > self._bound)
        if gradients_RxP.device.type == "cpu":  # a kernel with one bound for all is several times faster there
            for row in active_R.nonzero().flatten().tolist():
                gradients_RxP[row].clamp_(-self._bounds[row], self._bounds[row])
            return acted
        bound = torch.where(active_R, self._bound, float("inf")).to(gradients_RxP.dtype)[:, None]
        gradients_RxP.clamp_(-bound, bound)
        return acted
