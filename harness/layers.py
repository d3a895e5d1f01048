"""The layers, trial first. Each writes its weight's gradient straight into the flat gradient array.

Written as autograd functions for two reasons: nothing has to be zeroed or accumulated, and the reduction over
tokens happens per trial in one matrix product. Shapes: R trials, N = batch x context tokens, D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.parameters import Leaf
from harness.precision import Precision

# Typed as Any because torch's stubs give Function.apply no signature.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, precision: Precision) -> Tensor:
        x, weight = precision(x), precision(weight)
        ctx.save_for_backward(x, weight)
        ctx.gradient, ctx.precision = gradient, precision
        return precision(torch.bmm(x, weight.mT))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        precision, dy = ctx.precision, ctx.precision(dy)
        if precision.rounds is None and ctx.gradient.dtype == x.dtype:
            torch.baddbmm(ctx.gradient, dy.mT, x, beta=0, out=ctx.gradient)
        else:
            ctx.gradient.copy_(precision(torch.bmm(dy.mT, x)))
        return precision(torch.bmm(dy, weight)), None, None, None


def linear(x_RxNxI: Tensor, leaf: Leaf, precision: Precision) -> Tensor:
    """x @ weight^T for each trial, [R, N, out]; all that it reads and leaves, gradients too, is held in `precision`."""
    return _Linear.apply(x_RxNxI, leaf.weight, leaf.gradient, precision)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, ids: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        trials, vocabulary, width = weight.shape
        offset_ids = ids + torch.arange(0, trials * vocabulary, vocabulary, device=ids.device)[:, None]
        ctx.save_for_backward(offset_ids)
        ctx.gradient = gradient
        return torch.nn.functional.embedding(offset_ids, weight.reshape(trials * vocabulary, width))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (offset_ids,) = ctx.saved_tensors
        trials, vocabulary, width = ctx.gradient.shape
        dense = torch.ops.aten.embedding_dense_backward(dy, offset_ids, trials * vocabulary, -1, False)
        ctx.gradient.copy_(dense.view(trials, vocabulary, width))
        return None, None, None, None


def embedding(ids_RxN: Tensor, leaf: Leaf, root: Tensor) -> Tensor:
    """Rows of each trial's own table, [R, N, D]. `root` is any tensor that requires a gradient: it starts the graph."""
    return _Embedding.apply(root, ids_RxN, leaf.weight, leaf.gradient)


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        trials, context, width = weight.shape
        return (x.view(trials, -1, context, width) + weight[:, None]).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        trials, context, width = ctx.gradient.shape
        torch.sum(dy.view(trials, -1, context, width), 1, out=ctx.gradient)
        return dy, None, None


def add_positions(x_RxNxD: Tensor, leaf: Leaf) -> Tensor:
    """x plus the learned vector of each token's position; N counts whole sequences."""
    return _AddPositions.apply(x_RxNxD, leaf.weight, leaf.gradient)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gradient: Tensor, epsilon: float) -> Tensor:
        shape = [x.shape[-1]]
        normed, mean, rstd = torch.native_layer_norm(x, shape, None, None, epsilon)
        gain = gain.view(gain.shape[0], *[1] * (x.dim() - 2), gain.shape[1])
        ctx.save_for_backward(x, mean, rstd, normed, gain)
        ctx.gradient = gradient
        return normed * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, rstd, normed, gain = ctx.saved_tensors
        torch.sum((dy * normed).flatten(1, -2), 1, out=ctx.gradient)
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy * gain, x, [x.shape[-1]], mean, rstd, None, None, [True, False, False]
        )
        return dx, None, None, None


def layer_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> Tensor:
    """LayerNorm over the last dim with each trial's own gain and no bias, in the precision of the gain."""
    return _LayerNorm.apply(x_RxxxD.to(leaf.weight.dtype), leaf.weight, leaf.gradient, epsilon)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for source, target in zip(x, y, strict=True):
            torch.ops.aten.silu.out(source, out=target)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for arrived, source, target in zip(dy, x, dx, strict=True):
            torch.ops.aten.silu_backward.grad_input(arrived, source, grad_input=target)
        return dx


def silu(x_RxNxF: Tensor) -> Tensor:
    """x * sigmoid(x).

    A CPU rounds what is left over beside whole vectors at the end of a thread's share differently, and where that is
    depends on the number of trials. So there each trial is shared out on its own.
    """
    return _SiLU.apply(x_RxNxF) if x_RxNxF.device.type == "cpu" else torch.nn.functional.silu(x_RxNxF)
