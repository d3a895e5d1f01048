"""What number formats can hold, and what becomes of a softmax, a sum, a norm or a weight in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.config import ConfigError

TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def dtype_of(format_: str) -> torch.dtype:
    """The type of a format. Raises ConfigError for another name."""
    if format_ not in TYPES:
        raise ConfigError(f"format={format_}: unknown; allowed: {', '.join(TYPES)}")
    return TYPES[format_]


def softmax_limit(format_: str) -> float:
    """The logit beyond which exp overflows in a format: the logarithm of its largest number."""
    return math.log(torch.finfo(dtype_of(format_)).max)


def is_exp_finite(logit: float, format_: str) -> bool:
    """Whether exp of a logit is finite, computed and held in fp32, bf16 or fp16."""
    return bool(torch.tensor(logit, dtype=dtype_of(format_)).exp().isfinite())


def softmax(logits: Tensor, subtracts: bool = True) -> Tensor:
    """Softmax over the last axis; with `subtracts` the largest logit is taken from all of them before exp."""
    shifted = logits - logits.amax(-1, keepdim=True) if subtracts else logits
    exponentials = shifted.exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def neighbours(value: float, format_: str) -> tuple[float, float]:
    """The largest number of an 8-bit format that is at most `value`, and the smallest that is at least that."""
    dtype = dtype_of(format_)
    if dtype.itemsize != 1:
        raise ConfigError(f"format={format_}: not of 8 bits; allowed: fp8_e4m3, fp8_e5m2")
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    held = codes[codes.isfinite()]
    return float(held[held <= value].max()), float(held[held >= value].min())


def rounding_error(format_: str) -> float:
    """The largest relative error of rounding a normal number to the nearest one of a format: half of its epsilon."""
    return float(torch.finfo(dtype_of(format_)).eps) / 2


def running_sum_error(format_: str, count: int = 128, draws: int = 200, seed: int = 0) -> tuple[float, float]:
    """Mean and largest relative error of a running sum of so many values in [0.5, 1.5], added one after the other.

    The values themselves are numbers of the format, so what is lost is lost in the sum.
    """
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(draws, count, generator=generator) + 0.5).to(dtype_of(format_))
    total = torch.zeros(draws, dtype=values.dtype)
    for column in values.unbind(1):
        total = total + column
    exact = values.double().sum(1)
    error = (total.double() - exact).abs() / exact
    return float(error.mean()), float(error.max())


def ones_summed(format_: str, count: int) -> float:
    """A running sum of so many ones: it stands still where adding one is less than half of the last place."""
    one, total = torch.ones((), dtype=dtype_of(format_)), torch.zeros((), dtype=dtype_of(format_))
    for _ in range(count):
        total = total + one
    return float(total)


def rms_norm_at_zero(epsilon: float, width: int = 16) -> tuple[float, float]:
    """RMSNorm of zeros in fp32: the largest size of its output, and by how much its gradient grows on the way back.

    NaN and infinite without epsilon; otherwise 0 and 1 / sqrt(epsilon).
    """
    x = torch.zeros(width, requires_grad=True)
    y = x / (x.square().mean() + epsilon).sqrt()
    y.sum().backward()
    assert x.grad is not None
    return float(y.detach().abs().max()), float(x.grad.abs().max())


def gain_to_overflow(layers: int, format_: str) -> float:
    """By how much each of so many layers has to multiply a gradient of 1 for it to overflow."""
    return math.exp(softmax_limit(format_) / layers)


def ending_bits(weight: float) -> list[int]:
    """The bits of an fp32 weight, 0 (last place) to 31 (sign), of which a flip makes it infinite or NaN."""
    word = torch.tensor(weight, dtype=torch.float32).view(torch.int32)
    masks = torch.tensor([1 << bit if bit < 31 else -(1 << 31) for bit in range(32)], dtype=torch.int32)
    return [bit for bit, value in enumerate((word ^ masks).view(torch.float32)) if not value.isfinite()]


def largest_after_flip(weight: float) -> float:
    """The largest size of finite numbers to which a flip of one bit takes an fp32 weight."""
    word = torch.tensor(weight, dtype=torch.float32).view(torch.int32)
    masks = torch.tensor([1 << bit for bit in range(31)], dtype=torch.int32)
    values = (word ^ masks).view(torch.float32)
    return float(values[values.isfinite()].abs().max())
