"""Next-token cross-entropy, a number for each trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.basics.devices import on_cpu


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: Tensor | None, weights: Tensor | None) -> Tensor:
        log_p, slope = torch.log_softmax(logits, -1), None
        of_target = log_p.gather(-1, targets[..., None])
        if z_loss is not None:
            # log Z, the logarithm of the sum of exponentials, is what log_softmax has taken off every logit.
            slope = 2 * z_loss[:, None, None] * (logits.gather(-1, targets[..., None]) - of_target)
            # Chosen, not multiplied: where the coefficient is 0, a log Z that is not finite must not show.
            slope = torch.where(z_loss[:, None, None] == 0, 0.0, slope)
        ctx.save_for_backward(log_p, targets, slope, weights)
        losses = -of_target.squeeze(-1)
        return (losses if weights is None else torch.where(weights > 0, losses * weights, 0.0)).mean(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        log_p, targets, slope, weights = ctx.saved_tensors
        each = dloss[:, None, None] / targets.shape[1]
        each = each if weights is None else each * weights[..., None]
        dlogits = log_p.exp()
        of_target = dlogits.gather(-1, targets[..., None])
        if slope is None:
            dlogits.mul_(each)
        else:
            of_target.mul_(slope + 1.0)
            dlogits.mul_((slope + 1.0) * each)
        of_target.add_(-1.0).mul_(each)
        if on_cpu(dlogits):
            dlogits.scatter_(-1, targets[..., None], of_target)
        else:  # where scattering, made deterministic, would sort
            places = torch.arange(dlogits.shape[-1], device=dlogits.device)
            torch.where(places == targets[..., None], of_target, dlogits, out=dlogits)
        if weights is not None:
            dlogits.masked_fill_(weights[..., None] == 0, 0.0)  # 0 x NaN is NaN
        return dlogits, None, None, None


def cross_entropy(
    logits_RxNxV: Tensor, targets_RxN: Tensor, z_loss_R: Tensor | None = None, weights_RxN: Tensor | None = None
) -> Tensor:
    """Mean negative log-likelihood of the targets, [R], nat per token; that of each token times its weight, if any.

    Its gradient is that of the loss and the z-loss: `z_loss_R` times the mean of log^2 Z over tokens (PaLM, Chowdhery
    et al. 2022, arXiv 2204.02311, section 5). The value is without it: losses stay comparable whatever the coefficient.
    Of a token whose weight is 0 nothing shows in either, not even NaN.
    """
    return _CrossEntropy.apply(logits_RxNxV, targets_RxN, z_loss_R, weights_RxN)
