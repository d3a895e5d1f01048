"""The non-linearities of the feed-forward part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.layers import silu


@dataclass(frozen=True)
class Activation:
    """`function` of what the first matrix gives; where it is `gated`, times what a second one gives."""

    function: Callable[[Tensor], Tensor]
    gated: bool = False


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(F.gelu),  # Hendrycks & Gimpel 2016, arXiv 1606.08415
    "relu": Activation(F.relu),  # Vaswani et al. 2017, arXiv 1706.03762
    "swiglu": Activation(silu, gated=True),  # Shazeer 2020, arXiv 2002.05202
}


def clamp_swiglu(gate_RxNxF: Tensor, up_RxNxF: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """The gate at most c, before its SiLU, and the linear part from -c to c; c is `bound` [R, 1, 1].

    As gpt-oss and DeepSeek-V4 have it. The gradient of what is beyond a bound is zero.
    """
    return torch.clamp(gate_RxNxF, max=bound), torch.clamp(up_RxNxF, min=-bound, max=bound)
