"""What a value fault does to a number, which numbers and bits it takes, and what it refuses.

Numbers are compared with numpy and ml_dtypes (tests/number_formats.py), draws with their exact binomial intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2, norm

from harness.config import ConfigError
from harness.faults.facts import facts_of
from injectors.value import MODELS, Value
from tests.injectors.spies import differing, strike, trial, words
from tests.number_formats import BITS, MANTISSA, NUMPY

RARE = 1e-6  # chance that a test of draws fails by chance, were its seeds new ones
ANYTHING = [0.0, -0.0, 1.0, -1.5, 0.3, 2**-149, -1e-40, 1e-8, 6e-8, 65504.0, -65520.0, 1e30, 3.4e38]
ANYTHING += [math.inf, -math.inf, math.nan, 1e-3, 448.0, 465.0, 57344.0, 61441.0]
NEGATIVE = np.uint32(1 << 31)


def numbers() -> np.ndarray:
    return np.array(ANYTHING, dtype=np.float32)


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    """By ml_dtypes, but for fp8_e4m3, which has no infinity: there what is beyond 448 and its tie is infinite."""
    with np.errstate(all="ignore"):
        found = x.astype(NUMPY[name]).astype(np.float32)
    if name == "fp8_e4m3":
        return np.where(np.abs(x) > 464, np.copysign(np.float32(np.inf), x), found)
    return found


def after(fault: Value, values: np.ndarray, **options) -> np.ndarray:
    x = torch.from_numpy(values.copy())
    strike(fault, {"x": x}, **options)
    return x.numpy()


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Bit for bit, where they are numbers."""
    nan = np.isnan(expected)
    assert found.dtype == expected.dtype == np.float32 and np.array_equal(np.isnan(found), nan)
    assert found[~nan].tobytes() == expected[~nan].tobytes()


# --- fault models ------------------------------------------------------------------------------------------------

WRITTEN = {
    "zero": lambda x: np.zeros_like(x),
    "nan": lambda x: np.full_like(x, np.nan),
    "infinity": lambda x: np.full_like(x, np.inf),
    "minus_infinity": lambda x: np.full_like(x, -np.inf),
    "set": lambda x: np.full_like(x, 1.2345),
    "scale": lambda x: x * np.float32(1.2345),
    "sign": lambda x: (x.view(np.uint32) ^ NEGATIVE).view(np.float32),
    "round": lambda x: x,
}


def test_every_model_is_tried_here():
    assert {*WRITTEN, "noise", "bit_flip", "stuck_at_0", "stuck_at_1"} == set(MODELS)


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("model", WRITTEN)
def test_what_is_written(model, format):
    """Rounded to the format on its way."""
    fault = Value(elements=None, model=model, value=1.2345, format=format)
    with np.errstate(over="ignore"):
        expected = WRITTEN[model](numbers())
    assert_same(after(fault, numbers()), expected if format == "fp32" else rounded(expected, format))


@pytest.mark.parametrize("mask", [1, 1 << 22, 1 << 30, 1 << 31, 0b1110000])
@pytest.mark.parametrize("model", ["bit_flip", "stuck_at_0", "stuck_at_1"])
def test_bits_of_every_number(model, mask):
    x, low = numbers(), (mask & -mask).bit_length() - 1
    found = after(Value(elements=None, model=model, bit=low, bits=mask.bit_count()), x)
    before, mask = x.view(np.uint32), np.uint32(mask)
    want = {"bit_flip": before ^ mask, "stuck_at_0": before & ~mask, "stuck_at_1": before | mask}[model]
    assert found.tobytes() == want.tobytes()


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_a_bit_of_a_narrow_format_is_flipped_in_that_format(format):
    """The sign is the format's highest bit, and a number that is no number of the format is rounded to one."""
    x = np.array([1.0, -1.5, 0.3, 0.01], dtype=np.float32)
    assert (
        after(Value(elements=None, bit=BITS[format] - 1, format=format), x).tolist() == (-rounded(x, format)).tolist()
    )
    first = after(Value(elements=None, bit=0, format=format), x)
    steps = np.abs(first - rounded(x, format)) / 2.0 ** (np.floor(np.log2(np.abs(x))) - MANTISSA[format])
    assert np.allclose(steps[:3], 1, rtol=0, atol=0), "one unit in the last place"


def test_fp16_overflows_and_underflows():
    x = np.array([1.0, -0.07, 65504.0, 1e-4, 5.9e-8, 2.9e-8], dtype=np.float32)
    pushed = after(Value(elements=None, model="scale", value=1e6, format="fp16"), x)
    assert pushed.tolist() == [math.inf, -math.inf, math.inf, 100.0, *rounded(x[4:] * np.float32(1e6), "fp16").tolist()]
    assert after(Value(elements=None, model="round", format="fp16"), x)[-2:].tolist() == [2**-24, 0.0]


def test_noise_is_normal_with_that_deviation():
    """Mean and variance of 100,000 differences lie in their exact intervals."""
    n, deviation = 100_000, 0.25
    x = torch.zeros(100, n // 100)
    strike(Value(elements=None, model="noise", value=deviation), {"x": x})
    drawn = x.double().flatten() / deviation
    assert abs(drawn.mean()) < norm.isf(RARE / 2) / n**0.5
    low, high = chi2.interval(1 - RARE, n)
    assert low < (drawn**2).sum() < high
    assert len(drawn.unique()) > 0.99 * n


def test_noise_is_drawn_anew_for_every_tensor_step_and_seed():
    drawn = []
    for seed, step in ((0, 5), (0, 6), (1, 5)):
        tensors = {name: torch.zeros(50) for name in ("one", "two")}
        fault = Value(start=5, duration=3, elements=None, model="noise", value=1.0)
        strike(fault, tensors, seed=seed, step=step)
        again = {name: torch.zeros(50) for name in ("one", "two")}
        strike(fault, again, seed=seed, step=step)
        assert all(torch.equal(tensors[name], again[name]) for name in tensors)
        drawn += tensors.values()
    assert all(not (a == b).any() for a, b in combinations(drawn, 2))


def test_a_value_that_was_there_is_no_change():
    x = torch.tensor([0.5, -0.0, 2.0])
    for fault, changed in (
        (Value(element=0, model="set", value=0.5), False),
        (Value(element=1, model="zero"), True),  # minus zero becomes zero
        (Value(element=2, model="stuck_at_1", bit=30), False),
        (Value(element=2, model="round", format="fp8_e5m2"), False),
        (Value(element=2, model="stuck_at_0", bit=30), True),
    ):
        (event,) = strike(fault, {"x": x})
        assert event.changed == changed, fault


# --- which elements ----------------------------------------------------------------------------------------------

SHAPES = {"head": (7, 3), "blocks.0.up": (5, 4), "blocks.0.norm": (6,), "blocks.1.up": (50, 40), "blocks.10.up": (9,)}


def struck(fault: Value, seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, dict[int, int]]:
    """name -> element -> mask, for a fault that flips bits of zeros."""
    x = {name: torch.zeros(shape) for name, shape in shapes.items()}
    zeros = {name: value.clone() for name, value in x.items()}
    strike(fault, x, seed)
    return {name: {e: int(words(x[name]).ravel()[e]) for e in where} for name, where in differing(zeros, x).items()}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, set(SHAPES)),
        ({"tensor": "*.up"}, {"blocks.0.up", "blocks.1.up", "blocks.10.up"}),
        ({"tensor": "blocks.*", "layer": 1}, {"blocks.1.up"}),
        ({"layer": 0}, {"blocks.0.up", "blocks.0.norm"}),
        ({"tensor": "head"}, {"head"}),
    ],
)
def test_no_number_of_elements_means_all_of_all_matching_tensors(fields, names):
    found = struck(Value(elements=None, bit=3, **fields))
    assert set(found) == names
    assert all(len(found[name]) == math.prod(SHAPES[name]) and set(found[name].values()) == {8} for name in names)


@pytest.mark.parametrize("elements", [1, 2, 50, 2055, 2056])
def test_as_many_different_elements_as_were_asked_for(elements):
    found = struck(Value(elements=elements, bit=0), seed=3)
    assert sum(len(where) for where in found.values()) == elements


def test_a_given_element_of_one_of_the_matching_tensors():
    """Each as likely as the other, however large."""
    drawn = Counter()
    for seed in range(900):
        ((name, where),) = struck(Value(tensor="blocks.*", element=5, bit=0), seed).items()
        assert list(where) == [5]
        drawn[name] += 1
    low, high = binom.interval(1 - RARE, 900, 1 / 4)
    assert set(drawn) == set(SHAPES) - {"head"} and low <= min(drawn.values()) <= max(drawn.values()) <= high


def test_tensors_are_drawn_by_their_size():
    shapes, n = {"small": (15,), "large": (63,), "none": (400,)}, 3000
    drawn = Counter()
    for seed in range(n):
        x = {name: torch.zeros(shape) for name, shape in shapes.items()}
        strike(Value(tensor="[sl]*", bit=0), x, seed)
        drawn += Counter((name, int(x[name].argmax())) for name in x if x[name].any())
    assert {name for name, _ in drawn} == {"small", "large"} and drawn.total() == n
    low, high = binom.interval(1 - RARE, n, 15 / 78)
    assert low <= sum(count for (name, _), count in drawn.items() if name == "small") <= high
    low, high = binom.interval(1 - RARE / 78, n, 1 / 78)
    assert len(drawn) == 78 and low <= min(drawn.values()) and max(drawn.values()) <= high, "elements alike"


def test_the_address_follows_from_the_seed_alone():
    fault = Value(tensor="blocks.*", elements=3)
    found = [struck(fault, seed) for seed in range(50)]
    assert found == [struck(fault, seed) for seed in range(50)]
    assert len({tuple(sorted(str(address) for address in one.items())) for one in found}) == 50
    other = Value(tensor="blocks.*", elements=3, start=7, duration=9, bit=4)
    assert [{name: set(where) for name, where in struck(other, s).items()} for s in range(50)] == [
        {name: set(where) for name, where in one.items()} for one in found
    ], "at any step, and with any bit"


# --- which bits --------------------------------------------------------------------------------------------------

FIELDS = {"any": range(32), "sign": range(31, 32), "exponent": range(23, 31), "mantissa": range(23)}


def masks(fault: Value, count: int) -> list[int]:
    own = {fault.tensor: SHAPES[fault.tensor]}
    return [next(iter(where.values())) for seed in range(count) for where in struck(fault, seed, own).values()]


@pytest.mark.parametrize("field", FIELDS)
def test_one_bit_of_a_field(field):
    choices, n = FIELDS[field], 1500
    counts = Counter(mask.bit_length() - 1 for mask in masks(Value(tensor="head", field=field), n))
    assert set(counts) == set(choices)
    low, high = binom.interval(1 - RARE / 32, n, 1 / len(choices))
    assert low <= min(counts.values()) and max(counts.values()) <= high


@pytest.mark.parametrize(("field", "bits"), [("any", 2), ("exponent", 3), ("mantissa", 23), ("exponent", 8)])
def test_several_bits_side_by_side(field, bits):
    """Anywhere in the field, and never outside of it."""
    low, high = FIELDS[field][0], FIELDS[field][-1]
    places = Counter()
    for mask in masks(Value(tensor="head", field=field, bits=bits), 600):
        first = (mask & -mask).bit_length() - 1
        assert mask == ((1 << bits) - 1) << first
        places[first] += 1
    assert set(places) == set(range(low, high - bits + 2))


def test_several_bits_anywhere():
    drawn = masks(Value(tensor="head", field="exponent", bits=3, spread="scattered"), 1500)
    assert {mask.bit_count() for mask in drawn} == {3}
    assert set(drawn) == {sum(1 << bit for bit in chosen) for chosen in combinations(range(23, 31), 3)}


def test_a_given_bit_and_its_company():
    assert set(masks(Value(tensor="head", bit=4, bits=3), 20)) == {0b1110000}
    drawn = masks(Value(tensor="head", bit=4, bits=3, field="mantissa", spread="scattered"), 300)
    assert all(mask & 16 and mask.bit_count() == 3 and mask < 1 << 23 for mask in drawn)
    assert len(set(drawn)) > 100


def test_elements_have_bits_of_their_own():
    (found,) = struck(Value(tensor="blocks.1.up", elements=200)).values()
    assert len(set(found.values())) == 32


def test_all_that_is_wrong_is_said_at_once():
    fault = Value(start=1, tensor="head", elements=5000, bits=2, field="sign", rank=7)
    with pytest.raises(ConfigError) as caught:
        fault.check(facts_of(trial(fault)))
    assert [reason.partition("=")[0] for reason in caught.value.reasons] == [
        "fault.elements",
        "fault.bits",
        "fault.rank",
    ]
