"""Bits of numbers, changed in any of the formats of harness/model/formats.py."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model.formats import from_words, to_words

OPERATIONS = ("bit_flip", "stuck_at_0", "stuck_at_1")


def change_bits(values: Tensor, masks: Tensor, operation: str, format: str) -> Tensor:
    """`values` with the bits of `masks` flipped, cleared or set in `format`; the same shape and type.

    A value is converted to the format, its bits are changed there, and it is converted back. `values` is float64,
    float32, bfloat16, float16 or of the format's own type; `masks` is int64 of the same shape, without bits beyond the
    format's. Where no bit changes, the value stays what it was, unrounded.
    """
    words = to_words(values, format)
    masks = _narrow(masks, words.dtype)
    changed = {"bit_flip": words ^ masks, "stuck_at_0": words & ~masks, "stuck_at_1": words | masks}[operation]
    return torch.where(changed == words, values, from_words(changed, format, values.dtype))


def _narrow(masks: Tensor, words: torch.dtype) -> Tensor:
    """The same bits in fewer: the highest becomes the sign."""
    size = torch.iinfo(words).bits
    if not words.is_signed:
        return masks.to(words)
    return torch.where(masks >= 1 << (size - 1), masks - (1 << size), masks).to(words)


def is_zero(values: Tensor, format: str) -> Tensor:
    """Which values are zero, of either sign, once they are rounded to the format."""
    return from_words(to_words(values, format), format, torch.float32) == 0


def raw_bits(values: Tensor) -> list[str]:
    """The bits of each value of a flat tensor in its own type, in hexadecimal."""
    size = values.element_size()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [f"{int(word) & ((1 << 8 * size) - 1):0{2 * size}x}" for word in values.view(kinds[size]).tolist()]


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Where two tensors of one type are equal bit for bit: NaN equals itself, and zero is not minus zero."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[left.element_size()]
    return left.contiguous().view(kind) == right.contiguous().view(kind)
