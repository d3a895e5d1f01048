"""Number formats by their definition, with no arithmetic of torch's: what harness/model/formats.py is compared with.

Words are numpy arrays of uint64 whatever the format, values float64, which holds every number of these formats exactly.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

EXPONENT = {"fp64": 11, "fp32": 8, "bf16": 8, "fp16": 5, "fp8_e4m3": 4, "fp8_e5m2": 5}
MANTISSA = {"fp64": 52, "fp32": 23, "bf16": 7, "fp16": 10, "fp8_e4m3": 3, "fp8_e5m2": 2}
BITS = {name: 1 + EXPONENT[name] + MANTISSA[name] for name in EXPONENT}
SMALL = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")  # of which every word can be tried
NUMPY = {
    "fp64": np.float64,
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}  # torch's integers of that size


def tensor_of(words: np.ndarray, name: str) -> Tensor:
    """A tensor of the format's own type with these bits."""
    bits = BITS[name]
    return torch.from_numpy(words.astype(UNSIGNED[bits]).view(SIGNED[bits])).view(TORCH[name])


def words_of(x: Tensor) -> np.ndarray:
    """The bits of a tensor, of any type."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = x.element_size()
    integers = x if not x.is_floating_point() else x.view(kinds[size])
    return integers.contiguous().numpy().view(UNSIGNED[8 * size]).astype(np.uint64)


def every_word(name: str) -> np.ndarray:
    return np.arange(1 << BITS[name], dtype=np.uint64)


def random_words(name: str, count: int) -> np.ndarray:
    """Uniform bits: every exponent, subnormals, NaNs and infinities."""
    return np.random.default_rng(20).integers(0, 1 << BITS[name], count, dtype=np.uint64)


def rich_words(name: str) -> np.ndarray:
    """Words of fp32 or fp64: random ones, and those around every power of two and at both ends, of both signs."""
    mantissa, sign = MANTISSA[name], np.uint64(1 << (BITS[name] - 1))
    powers = np.arange(1 << EXPONENT[name], dtype=np.uint64) << np.uint64(mantissa)
    around = np.concatenate([powers, powers[:-1] + 1, powers[1:] - 1, powers + np.uint64(1 << (mantissa - 1))])
    return np.concatenate([around, around | sign, random_words(name, 200_000)])


def largest_word(name: str) -> int:
    """Without sign, the last word that is not NaN: infinity, or 448 in fp8_e4m3 (arXiv 2209.05433, table 1)."""
    return 0x7E if name == "fp8_e4m3" else ((1 << EXPONENT[name]) - 1) << MANTISSA[name]


def is_nan(words: np.ndarray, name: str) -> np.ndarray:
    return (words & np.uint64((1 << (BITS[name] - 1)) - 1)) > largest_word(name)


# --- words to values ---------------------------------------------------------------------------------------------


def value_of(word: int, name: str) -> float:
    """IEEE 754-2019, section 3.4: sign, biased exponent, fraction. All NaNs are one."""
    magnitude = word & ((1 << (BITS[name] - 1)) - 1)
    sign = -1.0 if word != magnitude else 1.0
    if magnitude > largest_word(name):
        return math.nan
    if magnitude == largest_word(name) and name != "fp8_e4m3":
        return sign * math.inf
    exponent = magnitude >> MANTISSA[name]
    fraction = Fraction(magnitude & ((1 << MANTISSA[name]) - 1), 1 << MANTISSA[name])
    bias = (1 << (EXPONENT[name] - 1)) - 1
    exact = (fraction + 1) * Fraction(2) ** (exponent - bias) if exponent else fraction * Fraction(2) ** (1 - bias)
    assert Fraction(float(exact)) == exact
    return math.copysign(float(exact), sign)


@cache
def _values(name: str) -> np.ndarray:
    return np.array([value_of(word, name) for word in range(1 << BITS[name])])


def decode(words: np.ndarray, name: str) -> np.ndarray:
    """float64 values of words of any format."""
    if name in SMALL:
        return _values(name)[words]
    return words.astype(UNSIGNED[BITS[name]]).view(NUMPY[name]).astype(np.float64)


# --- values to words ---------------------------------------------------------------------------------------------


@cache
def ladder(name: str) -> np.ndarray:
    """The finite numbers >= 0 of a small format in rising order: the index is the word."""
    numbers = _values(name)[: 1 << (BITS[name] - 1)]
    return numbers[np.isfinite(numbers)]


@cache
def midpoints(name: str) -> np.ndarray:
    """Between each number of the ladder and the next; the last one's next is where it would be without overflow."""
    numbers = ladder(name)
    beyond = 2 * numbers[-1] - numbers[-2]
    return (numbers + np.append(numbers[1:], beyond)) / 2  # exact: it takes one bit more than the format has


def encode(x: np.ndarray, name: str) -> np.ndarray:
    """The words of the numbers nearest to float64 values that are not NaN; of two, the one whose word is even.

    Beyond the last midpoint: infinity, or NaN in fp8_e4m3.
    """
    assert not np.isnan(x).any()
    if name in ("fp32", "fp64"):
        with np.errstate(over="ignore"):
            return x.astype(NUMPY[name]).view(UNSIGNED[BITS[name]]).astype(np.uint64)
    between, magnitude = midpoints(name), np.abs(x)
    below = np.searchsorted(between, magnitude, side="left")  # how many midpoints are below it
    tie = (np.append(between, np.inf)[below] == magnitude) & np.isfinite(magnitude)
    words = (below + (tie & (below % 2 == 1))).astype(np.uint64)
    return words | np.signbit(x).astype(np.uint64) << np.uint64(BITS[name] - 1)


def convert(words: np.ndarray, old: str, new: str) -> np.ndarray:
    """Words of one format in another: the nearest, NaN as `_nan` says."""
    if old == new:
        return words
    nan = is_nan(words, old)
    found = encode(decode(np.where(nan, 0, words), old), new)
    found[nan] = np.array([_nan(word, old, new) for word in words[nan].tolist()], dtype=np.uint64)
    return found


def _nan(word: int, old: str, new: str) -> int:
    """The same sign, and as much of the payload from its top as there is room for.

    A payload of which nothing is left becomes that of the quiet NaN. fp8_e4m3 has one NaN of each sign.
    """
    text = f"{word:0{BITS[old]}b}"
    payload = text[-MANTISSA[old] :].ljust(MANTISSA[new], "0")[: MANTISSA[new]]
    if "1" not in payload:
        payload = "1".ljust(MANTISSA[new], "0")
    if new == "fp8_e4m3":
        payload = "111"
    return int(text[0] + "1" * EXPONENT[new] + payload, 2)


# --- comparing ---------------------------------------------------------------------------------------------------


def assert_same_words(found: Tensor, expected: np.ndarray) -> None:
    found_words = words_of(found)
    wrong = np.flatnonzero(found_words != expected)
    shown = [f"{int(found_words[i]):x} instead of {int(expected[i]):x}" for i in wrong[:5]]
    assert not len(wrong), f"{len(wrong)} of {len(expected)}: {shown}"
