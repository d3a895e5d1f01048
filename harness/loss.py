"""Next-token cross-entropy, a number for each trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = torch.log_softmax(logits, -1)
        ctx.save_for_backward(log_p, targets)
        return -log_p.gather(-1, targets[..., None]).squeeze(-1).mean(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        log_p, targets = ctx.saved_tensors
        p = log_p.exp()
        p.scatter_add_(-1, targets[..., None], p.new_full((1, 1, 1), -1.0).expand(*targets.shape, 1))
        return p.mul_(dloss[:, None, None] / targets.shape[1]), None


def cross_entropy(logits_RxNxV: Tensor, targets_RxN: Tensor, z_loss_R: Tensor) -> Tensor:
    """Mean negative log-likelihood of the targets, [R], nat per token."""
    return _CrossEntropy.apply(logits_RxNxV, targets_RxN)
