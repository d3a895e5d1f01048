"""Clipping by global norm."""

from __future__ import annotations

from torch import Tensor

from harness.optim.clippers.base import Clipper
from harness.optim.clipping import clipping_factor, scale_trials


class GlobalNorm(Clipper):
    """`optim.clip`: gradients scaled to a global norm of at most that (Pascanu et al. 2013, arXiv 1211.5063).

    With the factor of torch.nn.utils.clip_grad_norm_.
    """

    part = "optim.clip"
    order = 90

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        factor = clipping_factor(norm_R, self.limit).masked_fill_(~active_R, 1.0)
        scale_trials(gradients_RxP, factor, self.layout)
        return factor != 1
