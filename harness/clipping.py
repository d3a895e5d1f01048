"""Gradient norms and clipping, per trial."""

from __future__ import annotations

import torch
from torch import Tensor

CPU_COLUMNS = 65_536  # a piece of that many is summed at once; never a function of R
SAFE = (1e-12, 1e15)  # a float32 norm in this range has neither overflowed nor lost anything that counts


def global_norm(gradients_RxP: Tensor) -> Tensor:
    """L2 norm over each trial's gradients, [R], float64; finite exactly if every element is.

    The squares of float32 overflow at 2e19, so a norm that is not well inside the range is taken again in float64. On
    a CPU that is seldom needed, and each trial's norm is chosen by itself; elsewhere looking would cost more.
    """
    if gradients_RxP.device.type != "cpu":
        return torch.linalg.vector_norm(gradients_RxP, dim=1, dtype=torch.float64)
    pieces = gradients_RxP.split(CPU_COLUMNS, dim=1)
    norm = _joined([torch.linalg.vector_norm(piece, dim=1) for piece in pieces])
    unsafe = ~((norm > SAFE[0]) & (norm < SAFE[1]))
    if bool(unsafe.any()):  # piece by piece, because the copy in float64 is twice as large as the gradients
        norm[unsafe] = _joined([torch.linalg.vector_norm(piece[unsafe].double(), dim=1) for piece in pieces])
    return norm


def _joined(norms: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms), dim=0, dtype=torch.float64)


def clip_by_global_norm(gradients_RxP: Tensor, norm_R: Tensor, threshold_R: Tensor) -> None:
    """Scale each trial's gradients in place to a norm of at most its threshold (infinite: leave them).

    The factor is min(1, threshold / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_.
    """
    factor = (threshold_R / (norm_R + 1e-6)).clamp_(max=1.0)
    gradients_RxP.mul_(factor.to(gradients_RxP.dtype)[:, None])
