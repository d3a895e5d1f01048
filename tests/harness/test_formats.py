"""Number formats against their definition (tests/number_formats.py) and torch's own conversion."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from harness.model.formats import FORMATS, from_words, round_to, to_words
from tests import number_formats as oracle
from tests.number_formats import BITS, SMALL, TORCH, assert_same_words, random_words, rich_words, tensor_of, words_of

WIDE = ("fp32", "fp64")
WIDER = [(name, wide) for name in FORMATS for wide in WIDE if name != wide]


# --- words and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_fields_are_those_of_the_definition(name):
    form = FORMATS[name]
    assert (form.bits, form.exponent, form.mantissa) == (BITS[name], oracle.EXPONENT[name], oracle.MANTISSA[name])
    assert [*form.field("mantissa"), *form.field("exponent"), *form.field("sign")] == list(form.field("any"))
    assert (form.dtype.itemsize * 8, form.words.itemsize * 8) == (form.bits, form.bits)
    one = int(words_of(to_words(torch.ones(1), name))[0])
    changed = {field: one ^ 1 << form.field(field)[-1] for field in ("mantissa", "exponent", "sign")}
    assert oracle.value_of(changed["mantissa"], name) == 1.5
    assert oracle.value_of(changed["sign"], name) == -1
    assert not abs(oracle.value_of(changed["exponent"], name)) <= 2  # infinite, NaN, or large in fp8_e4m3


@pytest.mark.parametrize(("name", "wide"), [pair for pair in WIDER if pair[0] in SMALL])
def test_every_word_has_the_value_of_its_definition(name, wide):
    words = oracle.every_word(name)
    found = from_words(to_view(words, name), name, TORCH[wide])
    assert found.dtype == TORCH[wide]
    assert_same_words(found, oracle.convert(words, name, wide))


def to_view(words: np.ndarray, name: str) -> torch.Tensor:
    return tensor_of(words, name).view(FORMATS[name].words)


@pytest.mark.parametrize(("name", "wide"), WIDER)
def test_words_come_back_from_a_wider_type(name, wide):
    """NaNs too: a bit that is flipped twice is what it was."""
    words = oracle.every_word(name) if name in SMALL else rich_words(name)
    assert_same_words(to_words(from_words(to_view(words, name), name, TORCH[wide]), name), words)


@pytest.mark.parametrize("name", FORMATS)
def test_words_of_the_formats_own_type_are_its_bits(name):
    words = oracle.every_word(name) if name in SMALL else rich_words(name)
    x = tensor_of(words, name)
    assert_same_words(to_words(x, name), words)
    assert_same_words(from_words(to_words(x, name), name, x.dtype), words)
    assert_same_words(round_to(x, name), words)


# --- rounding ----------------------------------------------------------------------------------------------------


def assert_rounds(x: torch.Tensor, name: str, expected: np.ndarray) -> None:
    """`x` has no NaN. Words are as expected, and rounding gives their values; infinity where fp8_e4m3 has NaN."""
    assert_same_words(to_words(x, name), expected)
    rounded = round_to(x, name)
    assert rounded.dtype == x.dtype
    values = oracle.decode(expected, name)
    np.testing.assert_array_equal(np.isnan(values), False if name != "fp8_e4m3" else np.abs(x.double().numpy()) > 464)
    values = np.where(np.isnan(values), np.copysign(np.inf, x.double().numpy()), values)
    assert_same_words(rounded.double(), values.view(np.uint64))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("name", "wide"), list(product(SMALL, WIDE)))
def test_midpoints_go_to_even_and_their_sides_to_the_nearest(name, wide, sign):
    """Between all neighbours, from zero and the smallest subnormal to the largest number and overflow.

    The expected words are the neighbours themselves: nothing is rounded to get them. Just above and below is the next
    float32 or float64, so float64 must not pass through float32 on its way.
    """
    between, numbers = oracle.midpoints(name), oracle.ladder(name)
    kind = oracle.NUMPY[wide]
    assert (between.astype(kind) == between).all()
    lower = np.arange(len(between), dtype=np.uint64)
    upper = lower + 1  # above the last: infinity, and NaN in fp8_e4m3
    expected = {
        "a number itself": (numbers.astype(kind), lower),
        "below": (np.nextafter(between.astype(kind), kind(0)), lower),
        "at": (between.astype(kind), np.where(lower % 2 == 0, lower, upper)),
        "above": (np.nextafter(between.astype(kind), kind(np.inf)), upper),
    }
    sign_bit = np.uint64(1 << (BITS[name] - 1) if sign < 0 else 0)
    for values, words in expected.values():
        assert_rounds(torch.from_numpy(sign * values), name, words | sign_bit)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("name", FORMATS)
def test_all_kinds_of_numbers_round_as_defined(name, wide):
    words = rich_words(wide)
    words = words[~oracle.is_nan(words, wide)]
    assert_rounds(tensor_of(words, wide), name, oracle.convert(words, wide, name))


@pytest.mark.parametrize("narrow", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_number_of_16_bits_rounds_as_defined(name, narrow):
    words = oracle.every_word(narrow)
    x = tensor_of(words, narrow)
    expected = oracle.convert(words, narrow, name)
    assert_same_words(to_words(x, name), expected)
    numbers = ~oracle.is_nan(words, narrow)
    back = oracle.convert(np.where(oracle.is_nan(expected, name), 0, expected), name, narrow)
    if name == "fp8_e4m3":
        values = oracle.decode(words, narrow)
        infinite = oracle.encode(np.copysign(np.inf, values), narrow)
        back = np.where(np.abs(np.nan_to_num(values)) > 464, infinite, back)
    selected = torch.from_numpy(numbers)
    assert_same_words(round_to(x, name)[selected], back[numbers])
    assert round_to(x, name)[~selected].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_of_float32_agrees_with_torch(name):
    """In fp8_e4m3 up to 464, because versions of torch differ beyond."""
    words = rich_words("fp32")
    x = tensor_of(words[~oracle.is_nan(words, "fp32")], "fp32")
    if name == "fp8_e4m3":
        x = x[x.abs() <= 464]
    assert_same_words(round_to(x, name), words_of(x.to(TORCH[name]).to(torch.float32)))


# --- NaN ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("old", ["fp64", "fp32", "bf16", "fp16"])
def test_a_nan_keeps_its_sign_and_the_top_of_its_payload(name, old):
    sign, infinity = np.uint64(1 << (BITS[old] - 1)), np.uint64(oracle.largest_word(old))
    payloads = random_words(old, 2000) >> np.uint64(1 + oracle.EXPONENT[old])
    lowest = np.array([1, 2, 3], dtype=np.uint64)
    single = np.uint64(1) << np.arange(oracle.MANTISSA[old], dtype=np.uint64)
    words = infinity | np.concatenate([payloads[payloads > 0], lowest, single])
    words = np.concatenate([words, words | sign])
    expected = oracle.convert(words, old, name)
    assert oracle.is_nan(expected, name).all()
    assert_same_words(to_words(tensor_of(words, old), name), expected)
    assert round_to(tensor_of(words, old), name).isnan().all()


@pytest.mark.parametrize("name", SMALL)
def test_the_word_of_a_value_does_not_depend_on_its_place(name):
    """Vectorised and scalar code differ in what NaN they make; words decide which bit flips do something."""
    words = np.array([0x7F800001, 0xFFC12345, 0x7FC00000, 0x3F800000, 0x7F800000], dtype=np.uint64)
    expected = oracle.convert(words, "fp32", name)
    for word, new in zip(words, expected, strict=True):
        for length in (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 65, 100):
            x = tensor_of(np.full(length, word), "fp32")
            assert_same_words(to_words(x, name), np.full(length, new))
            y = from_words(to_words(x, name), name, torch.float32)
            assert_same_words(y, oracle.convert(np.full(length, new), name, "fp32"))


# --- shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_any_shape_and_layout(name, dtype):
    x = torch.linspace(-3, 3, 24).to(dtype).reshape(2, 3, 4)
    for part in (x, x.mT, x[:, ::2, 1:], x[0, 0, 0], x[:0]):
        kept = part.clone()
        flat = part.contiguous().flatten()
        for function in (to_words, round_to):
            found = function(part, name)
            assert found.shape == part.shape
            assert torch.equal(found.contiguous().flatten(), function(flat, name))
        assert torch.equal(from_words(to_words(part, name), name, dtype), round_to(part, name))
        assert torch.equal(part, kept)
