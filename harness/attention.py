"""Causal self-attention with the trial folded into the batch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.config import Model
from harness.taps import Taps

LONGEST_EXPLICIT = 256  # tokens; beyond it the score matrix costs more than the taps on it are worth


def is_explicit(model: Model) -> bool:
    """Whether scores are an ordinary tensor. A property of the shape, never of what is attached or of the device."""
    return model.attention == "explicit" or (model.attention == "auto" and model.context <= LONGEST_EXPLICIT)


@lru_cache(maxsize=8)
def _rotation(context: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, H, D/2] complex: neighbouring features turn by position / 10000^(2i/D) (Su et al. 2021, eq. 15)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    # A copy for each head makes the inner loop of the product long: twice as fast as broadcasting.
    return torch.polar(torch.ones_like(angle), angle).to(device, kind)[:, None].repeat(1, heads, 1)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, rotation: Tensor, trials: int) -> Tensor:
        ctx.rotation, ctx.trials = rotation, trials
        return _turn(pairs, rotation, trials)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _turn(dy, ctx.rotation.conj().resolve_conj(), ctx.trials), None, None


def _turn(pairs: Tensor, rotation: Tensor, trials: int) -> Tensor:
    if pairs.device.type != "cpu":
        return pairs * rotation
    # A CPU rounds complex products at the end of a thread's share differently, so each trial is shared out on its own.
    turned = torch.empty(pairs.shape, dtype=pairs.dtype)
    for source, target in zip(pairs.chunk(trials), turned.chunk(trials), strict=True):
        torch.mul(source, rotation, out=target)
    return turned


def rotate(x_MxTxHxD: Tensor, dtype: torch.dtype, trials: int) -> Tensor:
    """Rotary positions: feature pairs (2i, 2i + 1) of each head turn with the position, computed in `dtype`."""
    pairs = torch.view_as_complex(x_MxTxHxD.to(dtype).unflatten(-1, (-1, 2)))
    turned = _Turn.apply(pairs, _rotation(*x_MxTxHxD.shape[1:], dtype, x_MxTxHxD.device), trials)
    return torch.view_as_real(turned).flatten(-2).to(x_MxTxHxD.dtype)


@lru_cache(maxsize=8)
def _causal_mask(context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((context, context), -math.inf, dtype=dtype, device=device).triu_(1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, explicit: bool, tap: Taps, name: str, trials: int) -> Tensor:
    """softmax(scale q k^T + causal mask) v.

    q, k, v: [M, T, H, D] with M = trials x batch. Returns [M, T, H, D]. The tap `<name>.scores` sees
    [R, M/R, H, T, T], masked entries at -inf; with the fused kernel it sees a copy that it cannot change, one sequence
    of the batch after the other, because all of them would not fit.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sequences, heads, context, _ = q.shape
    scores_name = f"{name}.scores"
    mask = _causal_mask(context, q.dtype, q.device)
    if not explicit:
        if scores_name in tap:
            with torch.no_grad():
                by_sequence = (x.unflatten(0, (trials, -1)).split(1, dim=1) for x in (q, k))
                for one_q, one_k in zip(*by_sequence, strict=True):
                    tap(scores_name, torch.matmul(one_q, one_k.mT).mul_(scale).add_(mask))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    q, k, v = (x.reshape(sequences * heads, context, -1) for x in (q, k, v))
    scores = torch.baddbmm(mask, q, k.mT, alpha=scale)
    scores = tap(scores_name, scores.view(trials, -1, heads, context, context)).view_as(scores)
    # As torch.autocast does: a softmax of half-precision scores is taken in float32.
    shares = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
    mixed = torch.bmm(shares, v)
    return mixed.view(sequences, heads, context, -1).transpose(1, 2)
