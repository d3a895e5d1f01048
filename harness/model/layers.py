"""Layers, norms and activations, trial first. Each writes its weight's gradient straight into the flat gradient array.

Their backward passes are written out for two reasons: nothing has to be zeroed or accumulated, and the reduction over
tokens happens per trial in one matrix product. Shapes: R trials, N = batch x context tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import Model
from harness.kernels import norms
from harness.kernels.use import are_used
from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.precision import Precision
from harness.model.products import product


class Leaf(NamedTuple):
    """A tensor of the model for all trials, and the place where its gradient goes; both [R, *shape]."""

    weight: Tensor
    gradient: Tensor


@differentiable
def linear(
    x_RxNxI: Tensor, leaf: Leaf, precision: Precision, bias: Leaf | None = None, by_channel: bool = False
) -> WithBackward[Tensor]:
    """x @ weight^T for each trial, plus its bias [R, out] if there is one: [R, N, out].

    All that it reads and leaves, gradients too, is held in `precision`, x `by_channel` where that has 8 bits; with a
    bias it is rounded once.
    """

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if bias is not None:
            bias.gradient.copy_(sums.total(dy, 1))
        dy = precision.gradient(dy)
        if precision.rounds is None and leaf.gradient.dtype == x.dtype:
            product(dy.mT, x, out=leaf.gradient, tf32=precision.tf32)
        else:
            leaf.gradient.copy_(precision(product(dy.mT, x, tf32=precision.tf32)))
        return precision(product(dy, weight, tf32=precision.tf32))

    x, weight = precision.operand(x_RxNxI, by_channel), precision.operand(leaf.weight)
    y = product(x, weight.mT, tf32=precision.tf32)
    return precision(y if bias is None else y.add_(precision(bias.weight)[:, None])), backward, (x, weight)


@differentiable
def embedding(root: Tensor, ids_RxN: Tensor, leaf: Leaf, adds: bool = False) -> WithBackward[Tensor]:
    """Rows of each trial's own table, [R, N, D]. `root` is any tensor that requires a gradient: it starts the graph.

    Its backward pass is the last of all; `adds`: to the gradient that a tied head has left there.
    """
    trials, vocabulary, width = leaf.weight.shape

    def backward(dy: Tensor, offset_ids: Tensor) -> None:
        if on_cpu(dy):
            dense = torch.ops.aten.embedding_dense_backward(dy, offset_ids, trials * vocabulary, -1, False)
        else:
            # Adds what one id gets in the order of its tokens; embedding_dense_backward cuts that by where it lies.
            dense = dy.new_zeros(trials * vocabulary, width)
            where, rows = [offset_ids.flatten()], dy.reshape(-1, width)
            torch.ops.aten._index_put_impl_(dense, where, rows, accumulate=True, unsafe=True)
        dense = dense.view(trials, vocabulary, width)
        leaf.gradient.add_(dense) if adds else leaf.gradient.copy_(dense)

    offset_ids = ids_RxN + torch.arange(0, trials * vocabulary, vocabulary, device=ids_RxN.device)[:, None]
    table = leaf.weight.reshape(trials * vocabulary, width)
    return F.embedding(offset_ids, table), backward, (offset_ids,)


@differentiable
def add_positions(x_RxNxD: Tensor, leaf: Leaf, context: int) -> WithBackward[Tensor]:
    """x plus the learned vector of each token's position; N counts sequences of `context` tokens each."""

    def backward(dy: Tensor) -> Tensor:
        sums.total_into(leaf.gradient[:, :context], dy.view(len(dy), -1, context, dy.shape[-1]), 1)
        leaf.gradient[:, context:] = 0
        return dy

    sequences = x_RxNxD.view(len(x_RxNxD), -1, context, x_RxNxD.shape[-1])
    return (sequences + leaf.weight[:, None, :context]).view_as(x_RxNxD), backward, ()


def layer_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> Tensor:
    """LayerNorm over the last dim with each trial's own gain, in the precision of the gain; a bias is `shifted`'s.

    Gains are [R, D], or [R, G, D]: a row of them for each index of dim 2 of x.
    """
    if _has_program(x_RxxxD, leaf):
        return _norm_program(x_RxxxD, leaf, epsilon, True)
    return _layer_norm(x_RxxxD, leaf, epsilon)


def rms_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> Tensor:
    """gain * x / sqrt(mean(x^2) + epsilon) over the last dim (Zhang & Sennrich 2019, arXiv 1910.07467, equation 4).

    Gains as in `layer_norm`. The paper has no epsilon; it stands where Llama's code has it.
    """
    if _has_program(x_RxxxD, leaf):
        return _norm_program(x_RxxxD, leaf, epsilon, False)
    return _rms_norm(x_RxxxD, leaf, epsilon)


@differentiable
def dynamic_tanh(x_RxxxD: Tensor, leaf: Leaf, epsilon: float, slope: Leaf) -> WithBackward[Tensor]:
    """gain * tanh(alpha x), with one learned alpha [R, 1] (Zhu et al. 2025, arXiv 2503.10622, equation 1).

    It stands in the place of a norm and is none: nothing is averaged, and `epsilon` has no part in it. Its bias is
    `shifted`'s.
    """

    def backward(dy: Tensor, x: Tensor, squashed: Tensor, alpha: Tensor, gain: Tensor) -> Tensor:
        sum_into(dy * squashed, leaf.gradient)
        inner = (squashed * squashed).neg_().add_(1.0).mul_(dy * gain)
        sum_into(inner * x, slope.gradient)
        return inner.mul_(alpha)

    x = x_RxxxD.to(leaf.weight.dtype)
    alpha, gain = beside(slope.weight, x), beside(leaf.weight, x)
    squashed = for_each_trial(torch.tanh, x * alpha)
    return squashed * gain, backward, (x, squashed, alpha, gain)


DYNAMIC_TANH = "dyt"
NORMS: Mapping[str, Callable[..., Tensor]] = {
    "layer": layer_norm,  # Ba et al. 2016, arXiv 1607.06450
    "rms": rms_norm,  # Zhang & Sennrich 2019, arXiv 1910.07467
    DYNAMIC_TANH: dynamic_tanh,  # Zhu et al. 2025, arXiv 2503.10622
}


def norm_beside(norm: str, x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> tuple[Tensor, Tensor]:
    """x for its other use, and its norm. Where that is a program, it adds the gradients of both, in autograd's bits."""
    if _has_program(x_RxxxD, leaf):
        return _norm_program_beside(x_RxxxD, leaf, epsilon, norm == "layer")
    return x_RxxxD, NORMS[norm](x_RxxxD, leaf, epsilon)


@differentiable
def _layer_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> WithBackward[Tensor]:
    shape = [x_RxxxD.shape[-1]]

    def backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, normed: Tensor, gain: Tensor) -> Tensor:
        sum_into(dy * normed, leaf.gradient)
        gradients = [True, False, False]
        dx: Tensor
        dx, *_ = torch.ops.aten.native_layer_norm_backward(dy * gain, x, shape, mean, rstd, None, None, gradients)
        return dx

    x = x_RxxxD.to(leaf.weight.dtype)
    normed, mean, rstd = torch.native_layer_norm(x, shape, None, None, epsilon)
    gain = beside(leaf.weight, x)
    return normed * gain, backward, (x, mean, rstd, normed, gain)


@differentiable
def _rms_norm(x_RxxxD: Tensor, leaf: Leaf, epsilon: float) -> WithBackward[Tensor]:
    def backward(dy: Tensor, rms: Tensor, normed: Tensor, gain: Tensor) -> Tensor:
        product = dy * normed
        sum_into(product, leaf.gradient)
        along = sums.mean(product.mul_(gain))[..., None]
        return (dy * gain).sub_(normed * along).div_(rms)

    x = x_RxxxD.to(leaf.weight.dtype)
    rms = sums.mean(x * x)[..., None].add_(epsilon).sqrt_()
    normed, gain = x / rms, beside(leaf.weight, x)
    return normed * gain, backward, (rms, normed, gain)


def _has_program(x: Tensor, leaf: Leaf) -> bool:
    return leaf.weight.dim() == 2 and x.shape[-1] <= norms.WIDEST and are_used(x.device)


@differentiable
def _norm_program(x: Tensor, leaf: Leaf, epsilon: float, is_layer: bool) -> WithBackward[Tensor]:
    def backward(dy: Tensor, x: Tensor, kept: Tensor, gain: Tensor) -> Tensor:
        return norms.normed_backward(dy.contiguous(), x, kept, gain, leaf.gradient)

    x = x.contiguous()
    normed, kept = norms.normed(x, leaf.weight, epsilon, is_layer)
    return normed, backward, (x, kept, leaf.weight)


@differentiable
def _norm_program_beside(x: Tensor, leaf: Leaf, epsilon: float, is_layer: bool) -> WithBackward[tuple[Tensor, Tensor]]:
    def backward(dx: Tensor, dy: Tensor, x: Tensor, kept: Tensor, gain: Tensor) -> Tensor:
        return norms.normed_backward(dy.contiguous(), x, kept, gain, leaf.gradient, dx.contiguous())

    near = x.contiguous()
    normed, kept = norms.normed(near, leaf.weight, epsilon, is_layer)
    return (x, normed), backward, (near, kept, leaf.weight)


def kept_by_norms(model: Model, fed: int) -> int:
    """Values that norms leave for the backward pass, without programs: two for each they are fed, of RMSNorm one."""
    return (1 if model.norm == "rms" else 2) * fed


@differentiable
def scaled(x_RxNxD: Tensor, leaf: Leaf) -> WithBackward[Tensor]:
    """x times a learned gain on each feature [R, D], or times one learned number [R, 1], in the precision of that."""

    def backward(dy: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        sum_into(dy * x, leaf.gradient)
        return dy * factor

    x, factor = x_RxNxD.to(leaf.weight.dtype), beside(leaf.weight, x_RxNxD)
    return x * factor, backward, (x, factor)


@differentiable
def shifted(x_RxxxD: Tensor, leaf: Leaf) -> WithBackward[Tensor]:
    """x plus one learned number [R, 1], or a bias of the shape of a gain in `layer_norm`, in the precision of that."""

    def backward(dy: Tensor) -> Tensor:
        sum_into(dy, leaf.gradient)
        return dy

    return x_RxxxD.to(leaf.weight.dtype) + beside(leaf.weight, x_RxxxD), backward, ()


def beside(gain: Tensor, x: Tensor) -> Tensor:
    """Gains [R, D] or [R, G, D] as they are multiplied with x [R, ..., D]."""
    if gain.dim() == 2:
        return gain.view(gain.shape[0], *[1] * (x.dim() - 2), gain.shape[1])
    return gain.view(gain.shape[0], 1, gain.shape[1], *[1] * (x.dim() - 4), gain.shape[2])


def sum_into(product: Tensor, target: Tensor) -> None:
    """Sum [R, ..., D] over tokens into [R, D], or into [R, G, D] with G its dim 2; or over everything into [R, 1]."""
    if target.dim() == 3:
        sums.total_into(target, product.transpose(1, 2).flatten(2, -2), 2)
    elif target.shape[1] == 1 < product.shape[-1]:
        target.copy_(sums.total(sums.total(product.flatten(1, -2), 1))[:, None])
    else:
        sums.total_into(target, product.flatten(1, -2), 1)


# --- elementwise functions ----------------------------------------------------------------------------------------


def for_each_trial(function: Callable[..., Tensor], x_Rxxx: Tensor) -> Tensor:
    """An elementwise `function(x, out=...)`, in place.

    A CPU may round what is left over beside whole vectors differently, and where that is depends on the number of
    trials. So there each trial has a call of its own.
    """
    for part in x_Rxxx if on_cpu(x_Rxxx) else (x_Rxxx,):
        function(part, out=part)
    return x_Rxxx


@differentiable
def sigmoid(x_Rxxx: Tensor) -> WithBackward[Tensor]:
    """1 / (1 + e^-x)."""

    def backward(dy: Tensor, y: Tensor) -> Tensor:
        return dy * y * (1 - y)

    y = for_each_trial(torch.sigmoid, x_Rxxx.clone())
    return y, backward, (y,)


@differentiable
def tanh(x_Rxxx: Tensor) -> WithBackward[Tensor]:
    """The hyperbolic tangent."""

    def backward(dy: Tensor, y: Tensor) -> Tensor:
        return (y * y).neg_().add_(1.0).mul_(dy)

    y = for_each_trial(torch.tanh, x_Rxxx.clone())
    return y, backward, (y,)


@differentiable
def soft_cap(x_Rxxx: Tensor, bound_Rxxx: Tensor) -> WithBackward[Tensor]:
    """c tanh(x / c), c = `bound` [R, 1, ...], in the type of `bound` (Gemma 2, arXiv 2408.00118, section 2).

    Values within a tenth of the bound change by less than 0.4%.
    """

    def backward(dy: Tensor, squashed: Tensor) -> Tensor:
        return (squashed * squashed).neg_().add_(1.0).mul_(dy)

    squashed = for_each_trial(torch.tanh, x_Rxxx.to(bound_Rxxx.dtype) / bound_Rxxx)
    return squashed * bound_Rxxx, backward, (squashed,)


@differentiable
def _curve(x: Tensor, name: str, options: dict[str, Any]) -> WithBackward[Tensor]:
    """An elementwise function of torch on a CPU, a call for each trial, as `for_each_trial` has it."""

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        function = getattr(torch.ops.aten, f"{name}_backward")
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for arrived, source, target in zip(dy, x, dx, strict=True):
            function.grad_input(arrived, source, **options, grad_input=target)
        return dx

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for source, target in zip(x, y, strict=True):
        getattr(torch.ops.aten, name).out(source, **options, out=target)
    return y, backward, (x,)


def silu(x_RxNxF: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _curve(x_RxNxF, "silu", {}) if on_cpu(x_RxNxF) else F.silu(x_RxNxF)


def gelu_tanh(x_RxNxF: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as GPT-2's code has it."""
    if on_cpu(x_RxNxF):
        return _curve(x_RxNxF, "gelu", {"approximate": "tanh"})
    return F.gelu(x_RxNxF, approximate="tanh")


@dataclass(frozen=True)
class Activation:
    """`function` of what the first matrix gives; where it is `gated`, times what a second one gives."""

    function: Callable[[Tensor], Tensor]
    gated: bool = False


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(F.gelu),  # Hendrycks & Gimpel 2016, arXiv 1606.08415
    "gelu_tanh": Activation(gelu_tanh),  # the same paper's approximation, as in GPT-2 (Radford et al. 2019)
    "relu": Activation(F.relu),  # Vaswani et al. 2017, arXiv 1706.03762
    "swiglu": Activation(silu, gated=True),  # Shazeer 2020, arXiv 2002.05202
}


@differentiable
def _clamp(x: Tensor, low: Tensor, high: Tensor) -> WithBackward[Tensor]:
    def backward(dy: Tensor, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        if not on_cpu(x):
            return torch.where((x >= low) & (x <= high), dy, 0.0)
        # Five times faster. It passes what lies between its bounds, so those are the next numbers outside of ours.
        lows = torch.nextafter(low, torch.full_like(low, -torch.inf)).flatten().tolist()
        highs = torch.nextafter(high, torch.full_like(high, torch.inf)).flatten().tolist()
        dx = torch.empty_like(dy)
        for arrived, source, below, above, target in zip(dy, x, lows, highs, dx, strict=True):
            torch.ops.aten.hardtanh_backward.grad_input(arrived, source, below, above, grad_input=target)
        return dx

    return torch.minimum(torch.maximum(x, low), high), backward, (x, low, high)


def is_beyond(gate_RxNxF: Tensor, up_RxNxF: Tensor, bound: Tensor) -> Tensor:
    """In which trials `clamp_swiglu` changes anything, [R]."""
    limit = bound.flatten()
    return (gate_RxNxF.detach().amax((1, 2)) > limit) | (up_RxNxF.detach().abs().amax((1, 2)) > limit)


def clamp_swiglu(gate_RxNxF: Tensor, up_RxNxF: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The gate at most c, before its SiLU, and the linear part from -c to c; c is `bound` [R, 1, 1].

    As gpt-oss and DeepSeek-V4 have it. The gradient is that of torch.clamp: zero beyond a bound, and on it as it comes.
    """
    gate = _clamp(gate_RxNxF, torch.full_like(bound, -torch.inf), bound)
    return gate, _clamp(up_RxNxF, -bound, bound)
