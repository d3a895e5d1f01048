"""Causal self-attention, trial first.

Shapes: R trials, B sequences of T tokens, H heads of D features.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.precision import Precision
from harness.taps import Taps


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, context: int, heads: int) -> tuple[Tensor, ...]:
        ctx.shape = qkv.shape
        parts = qkv.view(len(qkv), -1, context, 3, heads, qkv.shape[-1] // (3 * heads)).permute(3, 0, 1, 4, 2, 5)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        trials, batch, heads, context, head_dim = gradients[0].shape
        dqkv = gradients[0].new_empty(trials, batch, context, 3, heads, head_dim)
        for target, gradient in zip(dqkv.permute(3, 0, 1, 4, 2, 5), gradients, strict=True):
            target.copy_(gradient)
        return dqkv.view(ctx.shape), None, None


def split_heads(qkv_RxNx3D: Tensor, context: int, heads: int) -> tuple[Tensor, ...]:
    """Query, key and value, [R, B, H, T, D/H] each, of N = B x T tokens."""
    return _SplitHeads.apply(qkv_RxNx3D, context, heads)


@lru_cache(maxsize=8)
def _rotation(context: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, D/2] complex: neighbouring features turn by position / 10000^(2i/D) (Su et al. 2021, eq. 15)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angle), angle).to(device, kind)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Tensor, rotation: Tensor) -> Tensor:
        ctx.rotation = rotation
        return _turn(pairs, rotation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _turn(dy, ctx.rotation.conj().resolve_conj()), None


def _turn(pairs: Tensor, rotation: Tensor) -> Tensor:
    if pairs.device.type != "cpu" or torch.get_num_threads() == 1:
        return pairs * rotation
    # A CPU rounds complex products at the end of a thread's share differently, so each trial is shared out on its own.
    turned = torch.empty(pairs.shape, dtype=pairs.dtype)
    for source, target in zip(pairs, turned, strict=True):
        torch.mul(source, rotation, out=target)
    return turned


def rotate(x_RxBxHxTxD: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary positions: feature pairs (2i, 2i + 1) of each head turn with the position, computed in `dtype`."""
    pairs = torch.view_as_complex(x_RxBxHxTxD.to(dtype).unflatten(-1, (-1, 2)))
    turned = _Turn.apply(pairs, _rotation(*x_RxBxHxTxD.shape[-2:], dtype, x_RxBxHxTxD.device))
    return torch.view_as_real(turned).flatten(-2).to(x_RxBxHxTxD.dtype)


@lru_cache(maxsize=8)
def _causal_mask(context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((context, context), -math.inf, dtype=dtype, device=device).triu_(1)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float, precision: Precision) -> Tensor:
        ctx.save_for_backward(q, k)
        ctx.scale, ctx.precision = scale, precision
        scores = q.new_empty(*q.shape[:2], k.shape[1])
        torch.baddbmm(scores, q, k.mT, beta=0, alpha=scale, out=scores)
        return precision(scores).add_(_causal_mask(q.shape[1], q.dtype, q.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscores: Tensor) -> Any:
        q, k = ctx.saved_tensors
        dscores = ctx.precision(dscores)
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        torch.baddbmm(dq, dscores, k, beta=0, alpha=ctx.scale, out=dq)
        torch.baddbmm(dk, dscores.mT, q, beta=0, alpha=ctx.scale, out=dk)
        return dq, dk, None, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, explicit: bool, precision: Precision, tap: Taps, name: str
) -> Tensor:
    """softmax(scale q k^T + causal mask) v, its products in `precision` and its softmax in at least float32.

    q, k, v: [R, B, H, T, D]. Returns [R, B, T, H, D]. The tap `<name>.scores` sees [R, B, H, T, T], masked entries at
    -inf; with the fused kernel it sees a copy that it cannot change, one sequence of the batch after the other, because
    all of them would not fit.
    """
    shape, scores_name = q.shape, f"{name}.scores"
    q, k, v = precision(q), precision(k), precision(v)
    if not explicit:
        if scores_name in tap:
            mask = _causal_mask(shape[-2], q.dtype, q.device)
            with torch.no_grad():
                for one_q, one_k in zip(q.split(1, dim=1), k.split(1, dim=1), strict=True):
                    tap(scores_name, precision(torch.matmul(one_q, one_k.mT).mul_(scale)).add_(mask))
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return precision(mixed).view(shape).transpose(2, 3)
    q, k, v = (x.flatten(0, 2) for x in (q, k, v))
    scores = _Scores.apply(q, k, scale, precision)
    if scores_name in tap:
        scores = precision(tap(scores_name, scores.view(*shape[:-1], shape[-2]))).view_as(scores)
    # As torch.autocast does: a softmax of half-precision scores is taken in float32.
    shares = precision(torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)))
    return precision(torch.bmm(shares, v)).view(shape).transpose(2, 3)
