"""Number formats by name: what a value looks like in each, and rounding to it.

Rounding is to nearest, ties to even, subnormals as the format has them. Too large a value becomes infinite. fp8_e4m3
has no infinity (Micikevicius et al. 2022, arXiv 2209.05433, table 1), and versions of torch differ in what they make of
such a value; here its word is that of NaN, and rounding gives infinity as elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config.formats import HELD, LAYOUTS, BitLayout


@dataclass(frozen=True)
class Format(BitLayout):
    """A binary floating-point format: how its bits are used, its torch type, and the integer type of its words."""

    dtype: torch.dtype
    words: torch.dtype

    @property
    def largest(self) -> int:
        """The last of the words without sign that is not NaN: infinity, and 448 in fp8_e4m3."""
        return 0x7E if self.dtype == torch.float8_e4m3fn else ((1 << self.exponent) - 1) << self.mantissa


_TYPES = {
    "fp64": (torch.float64, torch.int64),
    "fp32": (torch.float32, torch.int32),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}
HELD_FORMATS = {name: Format(layout.exponent, layout.mantissa, *_TYPES[name]) for name, layout in HELD.items()}
"""Those that a tensor can be held in."""
FORMATS = {name: HELD_FORMATS[name] for name in LAYOUTS}
"""Those to which float32 can be rounded."""
FORMAT_OF = {known.dtype: name for name, known in HELD_FORMATS.items()}

LARGEST_E4M3 = 464.0  # the midpoint above 448, the largest number of the format; the tie goes to 448

_BY_TYPE = {known.dtype: known for known in HELD_FORMATS.values()}


def to_words(x: Tensor, name: str) -> Tensor:
    """`x` rounded to the format, as the integers whose bits it then has.

    `x` is float64, float32, bfloat16, float16 or of the format's own type. A NaN keeps its sign and what the format has
    room for of its payload, so `from_words` of any word, in a type with more bits, gives that word again.
    """
    return converted(x, HELD_FORMATS[name].dtype).view(HELD_FORMATS[name].words)


def raw_words(x: Tensor) -> Tensor:
    """The bits of `x` in its own type, as integers; integers as they are."""
    return x.contiguous().view(_BY_TYPE[x.dtype].words) if x.is_floating_point() else x


def from_words(words: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """The values of the integers that `to_words` gives."""
    return converted(words.view(HELD_FORMATS[name].dtype), dtype)


def round_to(x: Tensor, name: str) -> Tensor:
    """`x` rounded to the format, in its own type again. Which NaN a NaN becomes is not said."""
    dtype = HELD_FORMATS[name].dtype
    if x.dtype == dtype:
        return x
    rounded = _nearest(x, dtype).to(x.dtype)
    if name != "fp8_e4m3":
        return rounded
    return torch.where(x.abs() > LARGEST_E4M3, torch.copysign(torch.full_like(x, math.inf), x), rounded)


def real_view(x: Tensor) -> Tensor:
    """The real and imaginary parts of complex numbers, [..., 2], in the same memory; other tensors as they are."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def to_measure(x: Tensor) -> Tensor:
    """`real_view` of a tensor, in float32 where torch has no arithmetic for its type, which is of 8 bits."""
    parts = real_view(x)
    return parts.float() if parts.is_floating_point() and parts.element_size() == 1 else parts


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 rounded to the factors of TF32: its exponent, and 10 bits of mantissa instead of 23.

    NVIDIA A100 Tensor Core GPU Architecture (2020), which does not say how the hardware rounds; here it is to nearest,
    ties to even, and too large a value becomes infinite.
    """
    words = x.view(torch.int32)
    rounded = (words >> 13).bitwise_and_(1).add_(0xFFF).add_(words).bitwise_and_(-0x2000)
    return torch.where(x.isnan(), x, rounded.view(torch.float32))  # of a NaN the carry could make a zero


LARGEST_POWER = 2.0**126  # of the factors of `round_scaled`: float32 holds its reciprocal as a normal number


def round_scaled(x_Rxxx: Tensor, name: str, by_channel: bool = False) -> Tensor:
    """`x` rounded to a format of 8 bits, each trial at a scale of its own, in its own type again.

    A trial's values are multiplied by the largest power of two that keeps the largest of them among the format's finite
    numbers, rounded, and divided by it again. That is exact, so float32 and bfloat16 hold what a product of 8-bit
    numbers with a factor beside it would read. A trial that is not finite everywhere stays as it is. `by_channel`: each
    element of the last dim has a scale of its own over the dim before it, as tokens are, and of each expert.
    """
    dtype, magnitude = FORMATS[name].dtype, x_Rxxx.abs()
    if by_channel:
        largest = magnitude.amax(-2, keepdim=True).to(torch.float32)
    else:
        largest = magnitude.flatten(1).amax(1).to(torch.float32).view(-1, *[1] * (x_Rxxx.dim() - 1))
    ratio = (torch.finfo(dtype).max / largest).clamp(max=LARGEST_POWER)
    power = (ratio.view(torch.int32) & 0x7F800000).view(torch.float32)  # the bits of the mantissa cut off
    is_usable = torch.isfinite(largest) & (largest > 0)
    power = torch.where(is_usable, power, 1.0).to(x_Rxxx.dtype)
    rounded = (x_Rxxx * power).to(dtype).to(x_Rxxx.dtype).mul_(power.reciprocal())
    return torch.where(is_usable, rounded, x_Rxxx)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to another type, the same on every machine.

    With torch alone, the bits of a NaN depend on the machine and even on its place in the tensor, and what becomes of a
    value too large for fp8_e4m3 depends on the version.
    """
    if x.dtype == dtype:
        return x
    old, new = _BY_TYPE[x.dtype], _BY_TYPE[dtype]
    words = x.view(old.words).to(torch.int64)
    magnitude = words & ((1 << (old.bits - 1)) - 1)
    becomes_nan = magnitude > old.largest
    if new.dtype == torch.float8_e4m3fn:
        becomes_nan |= x.abs() > LARGEST_E4M3
    payload, more = magnitude & ((1 << old.mantissa) - 1), new.mantissa - old.mantissa
    payload = payload << more if more >= 0 else payload >> -more
    payload = torch.where(payload == 0, 1 << (new.mantissa - 1), payload)
    nan = (payload | ((1 << new.exponent) - 1) << new.mantissa).clamp(min=new.largest + 1)
    nan = torch.where(words == magnitude, nan, nan | -(1 << (new.bits - 1))).to(new.words)
    return torch.where(becomes_nan, nan, _nearest(x, dtype).view(new.words)).view(dtype)


def _nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's conversion, rounded once: torch takes float64 to float32 first, which must not round to nearest too.

    It is rounded to odd there: towards zero, and the last bit set where something was lost. Rounding that to nearest in
    a format of at most 22 bits equals rounding `x` (Boldo & Melquiond 2008, Emulation of FMA and correctly rounded
    sums, IEEE Transactions on Computers 57(4)).
    """
    if x.dtype != torch.float64 or dtype in (torch.float32, torch.float64):
        return x.to(dtype)
    near = x.to(torch.float32)
    words, back = near.view(torch.int32), near.to(torch.float64)
    towards_zero = torch.where(back.abs() > x.abs(), words - 1, words)
    return torch.where((back == x) | x.isnan(), words, towards_zero | 1).view(torch.float32).to(dtype)
