"""Bits of numbers, against whole words of the formats' definition (tests/number_formats.py) and `struct`."""

from __future__ import annotations

import struct
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from harness.model.formats import FORMATS
from injectors.value_strike import OPERATIONS, change_bits, raw_bits, same_bits
from tests import number_formats as oracle
from tests.number_formats import BITS, SMALL, TORCH, assert_same_words, random_words, rich_words, tensor_of, words_of

WIDE = ("fp32", "fp64")
STORED = [(name, stored) for name in FORMATS for stored in dict.fromkeys((*WIDE, name))]  # format, type of the values


def operated(words: np.ndarray, masks: np.ndarray, operation: str) -> np.ndarray:
    """Whole words: flipped, 0 or 1 where the mask has a 1."""
    return {"bit_flip": words ^ masks, "stuck_at_0": (words | masks) - masks, "stuck_at_1": words | masks}[operation]


def expected_words(words: np.ndarray, masks: np.ndarray, operation: str, name: str, stored: str) -> np.ndarray:
    """What values of type `stored` with these bits are afterwards, in bits."""
    inside = oracle.convert(words, stored, name)
    changed = operated(inside, masks, operation)
    back = every_value(name, stored)[changed] if name in SMALL else oracle.convert(changed, name, stored)
    return np.where(changed == inside, words, back)


@cache
def every_value(name: str, stored: str) -> np.ndarray:
    """The bits in `stored` of each word of a small format."""
    return oracle.convert(oracle.every_word(name), name, stored)


def masks_of(masks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(masks.astype(np.int64))


def one_bit(bit: int, count: int) -> np.ndarray:
    return np.full(count, 1 << bit, dtype=np.uint64)


def stored_words(name: str, stored: str) -> np.ndarray:
    """Every word of a small format, or a rich set of fp32's, as the bits of a type that holds them."""
    return every_value(name, stored) if name in SMALL else oracle.convert(rich_words("fp32")[::20], name, stored)


# --- one bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("name", "stored"), STORED)
def test_every_bit_of_every_number(name, stored, operation):
    """All words of the 8- and 16-bit formats, zeros, subnormals, infinities and NaNs among them."""
    words = stored_words(name, stored)
    x = tensor_of(words, stored)
    for bit in range(BITS[name]):
        masks = one_bit(bit, len(words))
        found = change_bits(x, masks_of(masks), operation, name)
        assert found.dtype == x.dtype
        assert_same_words(found, expected_words(words, masks, operation, name, stored))
    assert_same_words(x, words)


def test_every_bit_of_fp32_is_that_of_struct():
    """The bits of float32 tensors as `struct` packs them, with no conversion in between: payloads of NaN too."""
    numbers = [0.0, 1.0, -1.5, 3.14159, 2**-149, -(2**-126), 1e-40, 3.4028234663852886e38, float("inf"), float("-inf")]
    words = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    words += [0x80000000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FA54321, 0xFF812345, 0x7FFFFFFF]
    x = torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.float32)
    for bit in range(32):
        masks = torch.full((len(words),), 1 << bit)
        for operation, change in {
            "bit_flip": lambda word, bit=bit: word ^ 1 << bit,
            "stuck_at_0": lambda word, bit=bit: word & ~(1 << bit),
            "stuck_at_1": lambda word, bit=bit: word | 1 << bit,
        }.items():
            found = change_bits(x, masks, operation, "fp32").numpy().tobytes()
            assert list(struct.unpack(f"<{len(words)}I", found)) == [change(word) for word in words]


# --- several bits, and values between those of the format --------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("name", "stored"), list(product(FORMATS, WIDE)))
def test_any_bits_of_any_value(name, stored, operation):
    """Values that the format has to round, of any size; masks of any number of bits."""
    words = rich_words(stored)
    masks = random_words(name, len(words)) & np.roll(random_words(name, len(words)), 1)
    masks[::3] = 0
    found = change_bits(tensor_of(words, stored), masks_of(masks), operation, name)
    assert_same_words(found, expected_words(words, masks, operation, name, stored))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("name", "narrow"), list(product(FORMATS, ("bf16", "fp16"))))
def test_any_bits_of_values_of_16_bits(name, narrow, operation):
    words = oracle.every_word(narrow)
    masks = random_words(name, len(words))
    found = change_bits(tensor_of(words, narrow), masks_of(masks), operation, name)
    assert_same_words(found, expected_words(words, masks, operation, name, narrow))


@pytest.mark.parametrize("stored", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_where_no_bit_changes_the_value_stays_unrounded(name, stored):
    words = rich_words(stored) if stored in WIDE else oracle.every_word(stored)
    x = tensor_of(words, stored)
    inside = oracle.convert(words, stored, name)
    for operation in OPERATIONS:
        assert_same_words(change_bits(x, torch.zeros(len(x), dtype=torch.int64), operation, name), words)
    every = np.uint64((1 << BITS[name]) - 1)
    assert_same_words(change_bits(x, masks_of(inside), "stuck_at_1", name), words)
    assert_same_words(change_bits(x, masks_of(every - inside), "stuck_at_0", name), words)


def test_a_bit_stuck_at_what_it_was_does_not_round():
    x = torch.tensor([1.001, -1.001])
    sign = torch.full((2,), 1 << 7)
    assert change_bits(x, sign, "stuck_at_1", "fp8_e4m3").tolist() == [-1.0, x[1].item()]
    assert change_bits(x, sign, "stuck_at_0", "fp8_e4m3").tolist() == [x[0].item(), 1.0]


# --- shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_any_shape_and_layout_and_each_value_its_own_mask(name):
    x = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
    masks = (1 << torch.arange(24) % BITS[name]).reshape(2, 3, 4)
    one_by_one = [
        change_bits(value, mask, "bit_flip", name)
        for value, mask in zip(x.flatten(), masks.flatten(), strict=True)  # of no dimension
    ]
    expected = torch.stack(one_by_one).reshape(2, 3, 4)
    assert same_bits(change_bits(x, masks, "bit_flip", name), expected).all()
    for cut in (lambda t: t.mT, lambda t: t[:, ::2, 1:], lambda t: t[:0]):
        assert same_bits(change_bits(cut(x), cut(masks), "bit_flip", name), cut(expected)).all()


# --- looking at bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH)
def test_raw_bits_are_the_bits_in_hexadecimal(name):
    words = random_words(name, 300)
    digits = BITS[name] // 4
    assert raw_bits(tensor_of(words, name)) == [f"{word:x}".rjust(digits, "0") for word in words.tolist()]


def test_raw_bits_are_those_of_struct():
    values = [0.0, -0.0, 1.0, -1.0, 0.1, 1e-40, float("inf"), float("-inf")]
    assert raw_bits(torch.tensor(values)) == [struct.pack(">f", value).hex() for value in values]
    assert raw_bits(torch.tensor(values, dtype=torch.float64)) == [struct.pack(">d", value).hex() for value in values]
    assert raw_bits(torch.tensor([1.0, -2.0]).half()) == [struct.pack(">e", value).hex() for value in (1.0, -2.0)]
    assert raw_bits(torch.tensor([])) == []


@pytest.mark.parametrize("name", TORCH)
def test_same_bits_is_equality_of_bits(name):
    words = random_words(name, 300)
    nan, zero = np.uint64(oracle.largest_word(name) + 1), np.uint64(0)
    words[:2] = nan, zero
    x = tensor_of(words, name)
    assert same_bits(x, tensor_of(words.copy(), name)).all()
    for bit in range(BITS[name]):
        changed = words.copy()
        changed[::2] ^= np.uint64(1 << bit)
        assert same_bits(x, tensor_of(changed, name)).tolist() == [False, True] * 150
    minus_zero = tensor_of(np.array([1 << (BITS[name] - 1)], dtype=np.uint64), name)
    assert not same_bits(tensor_of(np.array([zero]), name), minus_zero).item()


def test_same_bits_of_any_layout():
    x = torch.arange(12.0).reshape(3, 4)
    assert same_bits(x.T, x.T.clone()).all() and same_bits(x.T, x.T.clone()).shape == (4, 3)
    assert words_of(x.T)[0, 1] == words_of(x)[1, 0]
