"""Bits of numbers, changed in any of the formats of harness/model/formats.py."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model.formats import from_words, raw_words, to_words

OPERATIONS = ("bit_flip", "stuck_at_0", "stuck_at_1")


def change_bits(values: Tensor, masks: Tensor, operation: str, format: str) -> Tensor:
    """`values` with the bits of `masks` flipped, cleared or set in `format`; the same shape and type.

    A value is converted to the format, its bits are changed there, and it is converted back. `values` is float64,
    float32, bfloat16, float16 or of the format's own type; `masks` is int64 of the same shape, without bits beyond the
    format's. Where no bit changes, the value stays what it was, unrounded.
    """
    words = to_words(values, format)
    size = 8 * words.element_size()
    if words.is_signed():  # the highest bit of the format is the sign of its word
        masks = torch.where(masks >= 1 << (size - 1), masks - (1 << size), masks)
    masks = masks.to(words.dtype)
    changed = {"bit_flip": words ^ masks, "stuck_at_0": words & ~masks, "stuck_at_1": words | masks}[operation]
    return torch.where(changed == words, values, from_words(changed, format, values.dtype))


def is_zero(values: Tensor, format: str) -> Tensor:
    """Which values are zero, of either sign, once they are rounded to the format."""
    return from_words(to_words(values, format), format, torch.float32) == 0


def raw_bits(values: Tensor) -> list[str]:
    """The bits of each value of a flat tensor in its own type, in hexadecimal."""
    size = values.element_size()
    return [f"{int(word) & ((1 << 8 * size) - 1):0{2 * size}x}" for word in raw_words(values).tolist()]


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Where two tensors of one type are equal bit for bit: NaN equals itself, and zero is not minus zero."""
    return raw_words(left) == raw_words(right)
