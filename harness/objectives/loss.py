"""Next-token cross-entropy, a number for each trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.basics.devices import on_cpu
from harness.kernels import losses
from harness.kernels.use import are_used
from harness.model import sums

PIECE = 2**28  # bytes: logits on an accelerator are taken in pieces of so much, if there are several


class _CrossEntropy(torch.autograd.Function):
    """What is kept for the backward pass, log p or the logits, becomes the gradient in place.

    For a large vocabulary there may be no room for a second array of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, z_loss: Tensor | None, weights: Tensor | None) -> Tensor:
        ctx.is_program = are_used(logits.device)
        if ctx.is_program:
            return _by_program(ctx, logits.contiguous(), targets, z_loss, weights)
        pieces = _pieces(logits)
        if len(pieces) == 1:
            kept = torch.log_softmax(logits, -1)
            of_target = kept.gather(-1, targets[..., None])
        else:
            kept, columns = logits, targets[..., None]
            parts = [torch.log_softmax(logits[:, here], -1).gather(-1, columns[:, here]) for here in pieces]
            of_target = torch.cat(parts, 1)
        slope = None
        if z_loss is not None:
            # log Z, the logarithm of the sum of exponentials, is what log_softmax has taken off every logit.
            slope = 2 * z_loss[:, None, None] * (logits.gather(-1, targets[..., None]) - of_target)
            # Chosen, not multiplied: where the coefficient is 0, a log Z that is not finite must not show.
            slope = torch.where(z_loss[:, None, None] == 0, 0.0, slope)
        ctx.save_for_backward(kept, targets, slope, weights)
        of_tokens = -of_target.squeeze(-1)
        return sums.mean(of_tokens if weights is None else torch.where(weights > 0, of_tokens * weights, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        if ctx.is_program:
            return _back_by_program(ctx, dloss), None, None, None
        kept, targets, slope, weights = ctx.saved_tensors
        each, pieces = dloss[:, None, None] / targets.shape[1], _pieces(kept)
        for here in pieces:
            place = kept[:, here]
            p = (place if len(pieces) == 1 else torch.log_softmax(place, -1)).exp_()
            of_piece = [None if x is None else x[:, here] for x in (slope, weights)]
            dlogits = _gradient(p, targets[:, here, None], each, *of_piece)
            if len(pieces) > 1:
                place.copy_(dlogits)
        return kept, None, None, None


def _by_program(ctx: Any, logits: Tensor, targets: Tensor, z_loss: Tensor | None, weights: Tensor | None) -> Tensor:
    of_target, log_z = losses.log_likelihood(logits, targets)
    share = torch.ones_like(log_z)
    if z_loss is not None:
        share += torch.where(z_loss[:, None] == 0, 0.0, 2 * z_loss[:, None] * log_z)
    ctx.save_for_backward(logits, targets, log_z, share, weights)
    of_tokens = -of_target
    return sums.mean(of_tokens if weights is None else torch.where(weights > 0, of_tokens * weights, 0.0))


def _back_by_program(ctx: Any, dloss: Tensor) -> Tensor:
    logits: Tensor
    logits, targets, log_z, share, weights = ctx.saved_tensors
    each = (dloss[:, None] / targets.shape[1]).expand_as(targets)
    each = each if weights is None else each * weights
    losses.likelihood_backward(logits, targets, log_z, share, each, weights is not None)
    return logits


def _pieces(logits_RxNxV: Tensor) -> list[slice]:
    """Tokens whose logits are taken together: on a CPU all."""
    tokens = logits_RxNxV.shape[1]
    size = logits_RxNxV.numel() * logits_RxNxV.itemsize
    each = tokens if on_cpu(logits_RxNxV) else max(1, tokens // max(1, size // PIECE))
    return [slice(start, min(start + each, tokens)) for start in range(0, tokens, each)]


def _gradient(p: Tensor, targets: Tensor, each: Tensor, slope: Tensor | None, weights: Tensor | None) -> Tensor:
    """That of some tokens' logits, in the place of their probabilities [R, n, V]; targets are [R, n, 1]."""
    each = each if weights is None else each * weights[..., None]
    of_target = p.gather(-1, targets)
    if slope is None:
        p.mul_(each)
    else:
        of_target.mul_(slope + 1.0)
        p.mul_((slope + 1.0) * each)
    of_target.add_(-1.0).mul_(each)
    if on_cpu(p):
        p.scatter_(-1, targets, of_target)
    else:  # where scattering, made deterministic, would sort
        torch.where(torch.arange(p.shape[-1], device=p.device) == targets, of_target, p, out=p)
    if weights is not None:
        p.masked_fill_(weights[..., None] == 0, 0.0)  # 0 x NaN is NaN
    return p


def cross_entropy(
    logits_RxNxV: Tensor, targets_RxN: Tensor, z_loss_R: Tensor | None = None, weights_RxN: Tensor | None = None
) -> Tensor:
    """Mean negative log-likelihood of the targets, [R], nat per token; that of each token times its weight, if any.

    Its gradient is that of the loss and the z-loss: `z_loss_R` times the mean of log^2 Z over tokens (PaLM, Chowdhery
    et al. 2022, arXiv 2204.02311, section 5). The value is without it: losses stay comparable whatever the coefficient.
    Of a token whose weight is 0 nothing shows in either, not even NaN.
    """
    loss: Tensor = _CrossEntropy.apply(logits_RxNxV, targets_RxN, z_loss_R, weights_RxN)  # type: ignore[no-untyped-call]
    return loss
