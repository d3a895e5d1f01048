"""Clipping of each tensor by its own norm."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.optim.clippers.base import Clipper
from harness.optim.clipping import clipping_factor, scale_tensors, tensor_norms


class PerTensor(Clipper):
    """`optim.clip_tensor`: each tensor's gradient scaled to a norm of at most that, whatever the others are.

    torch.nn.utils.clip_grad_norm_ on one tensor at a time (Keras' `clipnorm`).
    """

    part = "optim.clip_tensor"
    order = 20
    needs_norm = False

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        factors = clipping_factor(tensor_norms(gradients_RxP, self.layout), self.limit[:, None])
        factors = torch.where(active_R[:, None], factors, 1.0)
        scale_tensors(gradients_RxP, factors, self.layout)
        return (factors != 1).any(1)
