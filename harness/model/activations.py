"""The non-linearities of the feed-forward part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import gelu_tanh, silu


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
        if x.device.type != "cpu":
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
