"""Clipping by value."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.optim.clippers.base import Clipper


class ByValue(Clipper):
    """`optim.clip_value`: each element of a gradient held in [-bound, bound] (Mikolov 2012, in arXiv 1211.5063).

    As torch.nn.utils.clip_grad_value_: what is infinite becomes the bound, and NaN stays NaN.
    """

    part = "optim.clip_value"
    order = 10
    needs_norm = False
    repairs_infinity = True

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        acted: Tensor = active_R & (torch.linalg.vector_norm(gradients_RxP, torch.inf, dim=1) > self.limit)
        if on_cpu(gradients_RxP):  # a kernel with one bound for all is several times faster there
            bounds = self.limit.tolist()
            for row in active_R.nonzero().flatten().tolist():
                gradients_RxP[row].clamp_(-bounds[row], bounds[row])
            return acted
        bound = torch.where(active_R, self.limit, float("inf")).to(gradients_RxP.dtype)[:, None]
        gradients_RxP.clamp_(-bound, bound)
        return acted
