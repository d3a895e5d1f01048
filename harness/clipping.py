"""Gradient norms and clipping, per trial."""

from __future__ import annotations

import torch
from torch import Tensor

CPU_COLUMNS = 8192  # converted to float64 at a time, so that the copy stays in the cache; never a function of R


def global_norm(gradients_RxP: Tensor) -> Tensor:
    """L2 norm over each trial's gradients, [R], float64.

    In float64 because it is then finite exactly if every float32 element is; float32 squares overflow at 2e19.
    """
    columns = CPU_COLUMNS if gradients_RxP.device.type == "cpu" else gradients_RxP.shape[1]
    pieces = gradients_RxP.split(columns, dim=1)
    norms = torch.stack([torch.linalg.vector_norm(g, dim=1, dtype=torch.float64) for g in pieces])
    return norms.square_().sum(0).sqrt_()


def clip_by_global_norm(gradients_RxP: Tensor, norm_R: Tensor, threshold_R: Tensor) -> None:
    """Scale each trial's gradients in place to a norm of at most its threshold (infinite: leave them).

    The factor is min(1, threshold / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_.
    """
    factor = (threshold_R / (norm_R + 1e-6)).clamp_(max=1.0)
    gradients_RxP.mul_(factor.to(gradients_RxP.dtype)[:, None])
