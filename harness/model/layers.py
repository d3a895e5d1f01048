"""The layers, trial first. Each writes its weight's gradient straight into the flat gradient array.

Written as autograd functions for two reasons: nothing has to be zeroed or accumulated, and the reduction over
tokens happens per trial in one matrix product. Shapes: R trials, N = batch x context tokens, D features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.model.precision import Precision
from harness.model.products import product


class Leaf(NamedTuple):
    """A tensor of the model for all trials, and the place where its gradient goes; both [R, *shape]."""

    weight: Tensor
    gradient: Tensor


# Typed as Any because torch's stubs give Function.apply no signature.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, precision: Precision, bias: Leaf | None
    ) -> Tensor:
        x, weight = precision.operand(x), precision.operand(weight)
        ctx.save_for_backward(x, weight)
        ctx.gradient, ctx.precision, ctx.bias = gradient, precision, bias
        y = product(x, weight.mT)
        return precision(y if bias is None else y.add_(precision(bias.weight)[:, None]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.bias is not None:
            ctx.bias.gradient.copy_(dy.sum(1))
        precision, dy = ctx.precision, ctx.precision.gradient(dy)
        if precision.rounds is None and ctx.gradient.dtype == x.dtype:
            product(dy.mT, x, out=ctx.gradient)
        else:
            ctx.gradient.copy_(precision(product(dy.mT, x)))
        return precision(product(dy, weight)), None, None, None, None


def linear(x_RxNxI: Tensor, leaf: Leaf, precision: Precision, bias: Leaf | None = None) -> Tensor:
    """x @ weight^T for each trial, plus its bias [R, out] if there is one: [R, N, out].

    All that it reads and leaves, gradients too, is held in `precision`; with a bias it is rounded once.
    """
    return _Linear.apply(x_RxNxI, leaf.weight, leaf.gradient, precision, bias)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root: Tensor, ids: Tensor, weight: Tensor, gradient: Tensor, adds: bool) -> Tensor:
        trials, vocabulary, width = weight.shape
        offset_ids = ids + torch.arange(0, trials * vocabulary, vocabulary, device=ids.device)[:, None]
        ctx.save_for_backward(offset_ids)
        ctx.gradient, ctx.adds = gradient, adds
        return torch.nn.functional.embedding(offset_ids, weight.reshape(trials * vocabulary, width))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (offset_ids,) = ctx.saved_tensors
        trials, vocabulary, width = ctx.gradient.shape
        dense = torch.ops.aten.embedding_dense_backward(dy, offset_ids, trials * vocabulary, -1, False)
        dense = dense.view(trials, vocabulary, width)
        ctx.gradient.add_(dense) if ctx.adds else ctx.gradient.copy_(dense)
        return None, None, None, None, None


def embedding(ids_RxN: Tensor, leaf: Leaf, root: Tensor, adds: bool = False) -> Tensor:
    """Rows of each trial's own table, [R, N, D]. `root` is any tensor that requires a gradient: it starts the graph.

    Its backward pass is the last of all; `adds`: to the gradient that a tied head has left there.
    """
    return _Embedding.apply(root, ids_RxN, leaf.weight, leaf.gradient, adds)


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, context: int) -> Tensor:
        ctx.gradient, ctx.context = gradient, context
        return (x.view(len(x), -1, context, x.shape[-1]) + weight[:, None, :context]).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        context = ctx.context
        torch.sum(dy.view(len(dy), -1, context, dy.shape[-1]), 1, out=ctx.gradient[:, :context])
        ctx.gradient[:, context:] = 0
        return dy, None, None, None


def add_positions(x_RxNxD: Tensor, leaf: Leaf, context: int) -> Tensor:
    """x plus the learned vector of each token's position; N counts sequences of `context` tokens each."""
    return _AddPositions.apply(x_RxNxD, leaf.weight, leaf.gradient, context)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gradient: Tensor, epsilon: float) -> Tensor:
        shape = [x.shape[-1]]
        normed, mean, rstd = torch.native_layer_norm(x, shape, None, None, epsilon)
        gain = _beside(gain, x)
        ctx.save_for_backward(x, mean, rstd, normed, gain)
        ctx.gradient = gradient
        return normed * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, rstd, normed, gain = ctx.saved_tensors
        _sum_into(dy * normed, ctx.gradient)
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy * gain, x, [x.shape[-1]], mean, rstd, None, None, [True, False, False]
        )
        return dx, None, None, None


def layer_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> Tensor:
    """LayerNorm over the last dim with each trial's own gain, in the precision of the gain; a bias is `shifted`'s.

    Gains are [R, D], or [R, G, D]: a row of them for each index of dim 2 of x.
    """
    return _LayerNorm.apply(x_RxxxD.to(leaf.weight.dtype), leaf.weight, leaf.gradient, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, gradient: Tensor, epsilon: float) -> Tensor:
        rms = (x * x).mean(-1, keepdim=True).add_(epsilon).sqrt_()
        normed, gain = x / rms, _beside(gain, x)
        ctx.save_for_backward(rms, normed, gain)
        ctx.gradient = gradient
        return normed * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        rms, normed, gain = ctx.saved_tensors
        product = dy * normed
        _sum_into(product, ctx.gradient)
        along = product.mul_(gain).mean(-1, keepdim=True)
        return (dy * gain).sub_(normed * along).div_(rms), None, None, None


def rms_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + epsilon) over the last dim (Zhang & Sennrich 2019, arXiv 1910.07467, equation 4).

    Gains as in `layer_norm`. The paper has no epsilon; it stands where Llama's code has it.
    """
    return _RMSNorm.apply(x_RxxxD.to(leaf.weight.dtype), leaf.weight, leaf.gradient, epsilon)


def _beside(gain: Tensor, x: Tensor) -> Tensor:
    """Gains [R, D] or [R, G, D] as they are multiplied with x [R, ..., D]."""
    if gain.dim() == 2:
        return gain.view(gain.shape[0], *[1] * (x.dim() - 2), gain.shape[1])
    return gain.view(gain.shape[0], 1, gain.shape[1], *[1] * (x.dim() - 4), gain.shape[2])


def _sum_into(product: Tensor, target: Tensor) -> None:
    """Sum [R, ..., D] over tokens into [R, D], or into [R, G, D] with G its dim 2; or over everything into [R, 1]."""
    if target.dim() == 3:
        torch.sum(product.transpose(1, 2).flatten(2, -2), 2, out=target)
    elif target.shape[1] == 1 < product.shape[-1]:
        target.copy_(product.sum(1).sum(1, keepdim=True))
    else:
        torch.sum(product.flatten(1, -2), 1, out=target)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        ctx.gradient = gradient
        return x * factor[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, factor = ctx.saved_tensors
        _sum_into(dy * x, ctx.gradient)
        return dy * factor[:, None], None, None


def scaled(x_RxNxD: Tensor, leaf: Leaf) -> Tensor:
    """x times a learned gain on each feature [R, D], or times one learned number [R, 1], in the precision of that."""
    return _Scaled.apply(x_RxNxD.to(leaf.weight.dtype), leaf.weight, leaf.gradient)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, summand: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x + _beside(summand, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        _sum_into(dy, ctx.gradient)
        return dy, None, None


def shifted(x_RxxxD: Tensor, leaf: Leaf) -> Tensor:
    """x plus one learned number [R, 1], or a bias of the shape of a gain in `layer_norm`, in the precision of that."""
    return _Shifted.apply(x_RxxxD.to(leaf.weight.dtype), leaf.weight, leaf.gradient)


class _Curve(torch.autograd.Function):
    """An elementwise function on a CPU, trial by trial.

    A CPU rounds what is left over beside whole vectors at the end of a thread's share differently, and where that is
    depends on the number of trials. So each trial is shared out on its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: str, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.options = function, options
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for source, target in zip(x, y, strict=True):
            getattr(torch.ops.aten, function).out(source, **options, out=target)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,), backward = ctx.saved_tensors, getattr(torch.ops.aten, f"{ctx.function}_backward")
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for arrived, source, target in zip(dy, x, dx, strict=True):
            backward.grad_input(arrived, source, **ctx.options, grad_input=target)
        return dx, None, None


def silu(x_RxNxF: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _Curve.apply(x_RxNxF, "silu", {}) if x_RxNxF.device.type == "cpu" else torch.nn.functional.silu(x_RxNxF)


def gelu_tanh(x_RxNxF: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as GPT-2's code has it."""
    if x_RxNxF.device.type == "cpu":
        return _Curve.apply(x_RxNxF, "gelu", {"approximate": "tanh"})
    return torch.nn.functional.gelu(x_RxNxF, approximate="tanh")
