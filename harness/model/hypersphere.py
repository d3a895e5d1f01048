"""nGPT: weights, the residual stream, queries and keys on the unit hypersphere.

Loshchilov et al. 2024 (arXiv 2410.01131), section 2.6, in the form of their code (github.com/NVIDIA/ngpt). Every vector
along the width has norm 1: rows of matrices that read the stream, columns of those that write to it, of embedding and
head too, after each step (harness/optim/unit_rows.py). A branch f moves the stream x towards what it gives:

    x <- unit(x + |alpha| (unit(f(x)) - x))

with a learned alpha for each feature. Learned factors scale queries and keys, what the feed-forward part multiplies,
and logits. The authors learn each of them as a number of another size, times a constant: that is the learning rate and
epsilon of `speed`. Gradients are those of the factors: where the global norm is clipped theirs count by that constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from harness.config import Model, Trial, shown
from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import Leaf, beside, sum_into
from harness.model.parameters import Layout, new_weights
from harness.model.tensors import Kind, ScaledTensor

ALPHA = 0.05  # at the start: how far a branch moves the stream
ALONG_ROWS = (Kind.EMBEDDING, Kind.HIDDEN, Kind.HEAD)  # [..., width], each row of norm 1; Kind.RESIDUAL by its columns
LEFT_OUT = {
    "placement": "none",
    "parametrization": "standard",
    "positions": "rotary",
    "biases": False,
    **dict.fromkeys(("qk_norm", "qkv_norm", "value_norm", "projection_norm", "up_norm", "down_norm"), False),
    **dict.fromkeys(("embedding_norm", "depth_scaled_norms", "zero_head", "sigma_reparam"), False),
    "embedding_scale": "none",
    "layer_scale": None,
    "qk_clip": None,
    "residual_streams": 1,
}
"""What a model on the hypersphere has to have: norms of its own are all that stands there."""


def refused(trial: Trial) -> Iterator[str]:
    """What has no place beside `model.hypersphere`, each a line with key, value, and what is allowed."""
    model = trial.model
    if not model.hypersphere:
        return
    for name, value in LEFT_OUT.items():
        if (given := getattr(model, name)) != value:
            why = "model.hypersphere=true has norms of its own, and none of it"
            allowed = f"{shown(value)}, or model.hypersphere=false"
            yield f"model.{name}={shown(given)}: {why}; allowed: {allowed}"
    if model.init in ("zero_residual", "fixup"):
        yield f"model.init={model.init}: zeros have no direction; allowed: another init with model.hypersphere=true"
    if trial.optim.name == "schedule_free":
        why = "its two points are not both on the hypersphere"
        yield f"optim.name=schedule_free: {why}; allowed: another, or model.hypersphere=false"
    if (mixer := trial.section("block").channel_mixer) != "feedforward":
        why = "is not known on the hypersphere"
        yield f"block.channel_mixer={mixer}: {why}; allowed: feedforward, or model.hypersphere=false"


def speed(model: Model, kind: Kind) -> float:
    """The constant by which the authors multiply what they learn: start over scale, of their appendix."""
    if kind == Kind.SPHERE_STEP:
        return ALPHA * math.sqrt(model.width)
    return math.sqrt(model.width) if kind in (Kind.SPHERE_QK, Kind.SPHERE_LOGIT) else 1.0


@differentiable
def unit(x_RxxxD: Tensor) -> WithBackward[Tensor]:
    """x over its norm along the last dim; zero, and without a gradient, where that is zero."""

    def backward(dy: Tensor, y: Tensor, size: Tensor) -> Tensor:
        return torch.where(size == 0, 0.0, (dy - y * sums.total(dy * y)[..., None]) / size)

    y, size = _normed(x_RxxxD)
    return y, backward, (y, size)


def _normed(x_RxxxD: Tensor) -> tuple[Tensor, Tensor]:
    """x over its norm, and the norm [..., 1]; squares of x over its largest element do not overflow."""
    largest = x_RxxxD.abs().amax(-1, keepdim=True)
    x = x_RxxxD / torch.where(largest == 0, 1.0, largest)
    norm = sums.total(x * x)[..., None].sqrt_()
    return x / torch.where(norm == 0, 1.0, norm), norm * largest


@differentiable
def _moved(x_RxNxD: Tensor, towards_RxNxD: Tensor, leaf: Leaf) -> WithBackward[Tensor]:
    """x + |alpha| (towards - x)."""

    def backward(dy: Tensor, way: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        sum_into(dy * way * alpha.sign(), leaf.gradient)
        there = dy * alpha.abs()
        return dy - there, there

    way, alpha = towards_RxNxD - x_RxNxD, beside(leaf.weight, x_RxNxD)
    return x_RxNxD + way * alpha.abs(), backward, (way, alpha)


def moved(x_RxNxD: Tensor, branch_RxNxD: Tensor, leaf: Leaf) -> Tensor:
    """The residual stream after a branch; `leaf` is its alpha [R, D]."""
    return unit(_moved(unit(x_RxNxD), unit(branch_RxNxD.to(x_RxNxD.dtype)), leaf))


def on_sphere(layout: Layout, flat_RxP: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every matrix of a flat array of weights, a view [R, ...], and what it is with vectors of norm 1."""
    for scaled in layout.tensors:
        if (dim := _along(scaled)) is not None:
            view = layout.view(flat_RxP, scaled.name)
            # Row by row of a trial: what is summed lies as it does in any pack.
            lines, _ = _normed(view if dim == 2 else view.mT.contiguous())
            yield view, lines if dim == 2 else lines.mT


def _along(scaled: ScaledTensor) -> int | None:
    """The dim of [R, out, in] along which a tensor's vectors lie."""
    if scaled.kind in ALONG_ROWS:
        return 2
    return 1 if scaled.kind == Kind.RESIDUAL else None


def initial_weights(layout: Layout, trials: Sequence[Trial], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`new_weights` of trials that are all on the hypersphere, or none, [R, P]."""
    flat_RxP = new_weights(layout, trials, dtype, device)
    for view, values in on_sphere(layout, flat_RxP) if trials[0].model.hypersphere else ():
        view.copy_(values)
    return flat_RxP
