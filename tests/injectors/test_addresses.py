"""Samples of fault addresses: fair, without repeats, the same everywhere, and good to go on with."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from functools import cache
from itertools import islice, product

import numpy as np
import pytest
from scipy.stats import binom, binomtest, chisquare

from harness.config import ConfigError
from injectors.addresses import (
    STRATIFICATIONS,
    WEIGHTS,
    Address,
    Population,
    half_width,
    in_order,
    sample,
    strata,
    stratum_of,
)

SHAPES = {
    "embedding": (256, 64),
    "positions": (64, 64),
    "blocks.0.attention.query": (64, 64),
    "blocks.0.feedforward.up": (256, 64),
    "blocks.1.attention.query": (64, 64),
    "blocks.10.attention.query": (64, 64),
    "final_norm": (64,),
    "head": (256, 64),
}
LARGE = Population(SHAPES, tuple(range(32)), range(100, 350))
DRAWS = 100_000

SMALL = [
    Population({"blocks.0.a": (2, 3), "head": (), "blocks.1.b": (5,)}, (0, 7, 31), range(4)),
    Population({"blocks.0.a": (2, 3), "b": (3,)}, None, range(10, 35, 2)),
    Population({"a": (4, 4), "b": (5,)}, (30,), range(7, 8), element=4),
    Population({"a": (0, 4), "b": (3,), "c": (0,)}, (1, 2), range(3)),
]


def each_way(population: Population) -> list[tuple[str, str]]:
    """Every weight with every stratification that the population has."""
    return [pair for pair in product(WEIGHTS, STRATIFICATIONS) if population.bits is not None or pair[1] != "bit"]


EACH_WAY = [
    pytest.param(population, weight, stratify, id=f"{i}-{weight}-{stratify}")
    for i, population in enumerate(SMALL)
    for weight, stratify in each_way(population)
]


def assert_shares(drawn: list[str], expected: dict[str, float]) -> None:
    """Each count lies in its exact binomial interval of 99.9% for all of them together (Bonferroni).

    Drawing without repeats from a population much larger than the sample only narrows the counts.
    """
    counts = Counter(drawn)
    assert set(counts) <= set(expected) and math.isclose(sum(expected.values()), 1)
    for name, share in expected.items():
        low, high = binom.interval(1 - 0.001 / len(expected), len(drawn), share)
        assert low <= counts[name] <= high, f"{name}: {counts[name]} of {len(drawn)}, expected {low:.0f} to {high:.0f}"


# --- the population ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("population", SMALL)
def test_each_number_is_one_address_and_each_address_one_number(population):
    expected = [
        Address(name, element, bit, step)
        for name, shape in population.shapes.items()
        for element in (range(math.prod(shape)) if population.element is None else [population.element])
        for bit in population.bits or [None]
        for step in population.steps
    ]
    assert population.size == len(expected)
    assert [population.address(number) for number in range(population.size)] == expected


@pytest.mark.parametrize("number", [-1, SMALL[0].size])
def test_there_is_no_address_beyond_the_population(number):
    with pytest.raises(IndexError, match=f"{number} of a population of {SMALL[0].size}"):
        SMALL[0].address(number)


def test_a_population_may_be_larger_than_any_machine_integer():
    size = 2**70
    population = Population({"a": (2**40, 2**20), "b": (2**60,)}, tuple(range(32)), range(2**4))
    assert population.size == size
    assert population.address(size - 1) == Address("b", 2**60 - 1, 31, 2**4 - 1)
    drawn = sample(population, 1000, seed=0)
    assert len(set(drawn)) == 1000
    assert max(address.element for address in drawn) > 2**59  # chance that none is: 2^-1000


@pytest.mark.parametrize("element", [5, -1])
def test_an_element_that_a_tensor_lacks_is_refused(element):
    with pytest.raises(ConfigError, match=rf"^fault\.element={element}: beyond tensor b, .*; allowed: 0 to 4$"):
        Population({"b": (5,), "a": (4, 4)}, None, range(1), element=element)


# --- what every sample holds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("population", "weight", "stratify"), EACH_WAY)
def test_a_sample_of_all_has_each_address_once(population, weight, stratify):
    drawn = sample(population, population.size, 5, weight, stratify)
    everything = {population.address(number) for number in range(population.size)}
    assert len(drawn) == len(everything) and set(drawn) == everything
    assert list(in_order(population, 5, weight, stratify)) == drawn  # and then it ends


@pytest.mark.parametrize(("population", "weight", "stratify"), EACH_WAY)
def test_fewer_samples_are_the_beginning_of_more(population, weight, stratify):
    everything = sample(population, population.size, 6, weight, stratify)
    for count in range(population.size):
        assert sample(population, count, 6, weight, stratify) == everything[:count]


@pytest.mark.parametrize(("weight", "stratify"), each_way(LARGE))
def test_large_samples_repeat_nothing_and_begin_alike(weight, stratify):
    many = sample(LARGE, 20_000, 7, weight, stratify)
    assert len(set(many)) == 20_000
    for count in (1, 9, 33, 1000, 5000):
        assert sample(LARGE, count, 7, weight, stratify) == many[:count]


@pytest.mark.parametrize(("weight", "stratify"), each_way(LARGE))
def test_another_seed_gives_another_sample(weight, stratify):
    first, second = (sample(LARGE, 200, seed, weight, stratify) for seed in (0, 1))
    assert not set(first) & set(second)  # final_norm, the smallest, has 512,000 addresses


def test_all_of_a_population_of_twenty_thousand():
    population = Population({"blocks.0.a": (50, 10), "b": (2,)}, tuple(range(8)), range(5))
    assert len(set(sample(population, population.size, 0, "tensor", "layer"))) == population.size == 20_080


# --- fairness ----------------------------------------------------------------------------------------------------


@cache
def drawn_by_size() -> tuple[Address, ...]:
    return tuple(sample(LARGE, DRAWS, 11))


@pytest.mark.parametrize("kind", STRATIFICATIONS[1:])
def test_by_size_every_address_is_equally_likely(kind):
    drawn = [stratum_of(address, LARGE, kind) for address in drawn_by_size()]
    total = sum(math.prod(shape) for shape in SHAPES.values())
    if kind == "tensor":
        expected = {name: math.prod(shape) / total for name, shape in SHAPES.items()}
    elif kind == "layer":
        names = {"blocks.0": 64 * 64 + 256 * 64, "blocks.1": 64 * 64, "blocks.10": 64 * 64, "final_norm": 64}
        names |= {"embedding": 256 * 64, "positions": 64 * 64, "head": 256 * 64}
        expected = {name: size / total for name, size in names.items()}
    elif kind == "bit":
        expected = {str(bit): 1 / 32 for bit in range(32)}
    else:
        expected = {f"{first}-{first + 24}": 1 / 10 for first in range(100, 350, 25)}
    assert_shares(drawn, expected)


def test_by_size_elements_are_uniform():
    drawn = [address for address in drawn_by_size() if address.tensor == "embedding"]
    assert_shares([str(address.element // 1024) for address in drawn], {str(i): 1 / 16 for i in range(16)})


def test_by_tensor_every_tensor_is_equally_likely_and_then_every_address():
    population = Population({**SHAPES, "final_norm": (4096,)}, LARGE.bits, LARGE.steps)
    drawn = sample(population, DRAWS, 13, "tensor")
    assert_shares([address.tensor for address in drawn], {name: 1 / len(SHAPES) for name in SHAPES})
    assert_shares([str(address.bit) for address in drawn], {str(bit): 1 / 32 for bit in range(32)})
    assert_shares([str(address.step) for address in drawn], {str(step): 1 / 250 for step in population.steps})
    inside = [address for address in drawn if address.tensor == "head"]
    assert_shares([str(address.element // 1024) for address in inside], {str(i): 1 / 16 for i in range(16)})


def test_a_tensor_of_which_all_is_drawn_leaves_its_chance_to_the_others():
    population = Population({"tiny": (3,), "a": (10**6,), "b": (10**7,)}, None, range(10))
    drawn = [address.tensor for address in sample(population, DRAWS, 14, "tensor")]
    assert drawn.count("tiny") == 30
    after = DRAWS - drawn[::-1].index("tiny")
    assert after < 1000  # 30 successes at one in three; 1,000 draws without them have a chance below 1e-100
    assert_shares(drawn[after:], {"a": 1 / 2, "b": 1 / 2})


def test_the_order_of_a_small_population_is_uniform():
    """Each of the 24 orders of four addresses, over many seeds."""
    population = Population({"a": (4,)}, None, range(1))
    orders = ["".join(str(address.element) for address in sample(population, 4, seed)) for seed in range(24_000)]
    every = {"".join(order): 1 / 24 for order in product("0123", repeat=4) if len(set(order)) == 4}
    assert_shares(orders, every)


# --- strata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("stratify", STRATIFICATIONS[1:])
def test_strata_get_the_same_number_to_within_one(weight, stratify):
    names = list(strata(LARGE, stratify))
    counts = Counter(dict.fromkeys(names, 0))
    for address in sample(LARGE, 2000, 15, weight, stratify):
        counts[stratum_of(address, LARGE, stratify)] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
    assert set(counts) == set(names)


def test_the_remainder_goes_to_any_stratum():
    """One draw among eight strata: the first of every seed."""
    drawn = [sample(LARGE, 9, seed, stratify="tensor") for seed in range(4000)]
    assert_shares([nine[0].tensor for nine in drawn], dict.fromkeys(SHAPES, 1 / 8))
    assert_shares([nine[8].tensor for nine in drawn], dict.fromkeys(SHAPES, 1 / 8))
    same = sum(nine[0].tensor == nine[8].tensor for nine in drawn)  # rounds are ordered independently of each other
    assert binomtest(same, len(drawn), 1 / 8).pvalue > 0.001


def test_strata_too_small_give_all_and_the_others_the_rest():
    population = Population({"a": (3,), "b": (1000,), "c": (10,), "d": (1000,)}, None, range(2))
    counts = Counter(address.tensor for address in sample(population, 1001, 16, stratify="tensor"))
    assert (counts["a"], counts["c"]) == (6, 20)
    assert sorted((counts["b"], counts["d"])) == [487, 488]


@pytest.mark.parametrize(("weight", "expected"), [("size", {"small": 1 / 5, "big": 4 / 5}), ("tensor", None)])
def test_the_weight_holds_inside_a_stratum(weight, expected):
    shapes = {"blocks.0.small": (10**6,), "blocks.0.big": (4 * 10**6,), "head": (10**6,)}
    drawn = sample(Population(shapes, None, range(10)), 20_000, 17, weight, "layer")
    inside = [address.tensor.removeprefix("blocks.0.") for address in drawn if address.tensor != "head"]
    assert len(inside) == 10_000
    assert_shares(inside, expected or {"small": 1 / 2, "big": 1 / 2})


def test_names_of_strata():
    layers = ["embedding", "positions", "blocks.0", "blocks.1", "blocks.10", "final_norm", "head"]
    assert list(strata(LARGE, "layer")) == layers
    two = Population({"blocks.2": (1,), "head.input": (1,)}, None, range(1))
    assert list(strata(two, "layer")) == ["blocks.2", "head"]
    assert list(strata(LARGE, "tensor")) == list(SHAPES)
    assert list(strata(LARGE, "bit")) == [str(bit) for bit in range(32)]
    assert list(strata(LARGE, "none")) == ["all"]
    assert list(strata(LARGE, "step"))[:2] == ["100-124", "125-149"]
    ten = Population({"a": (1,)}, None, range(5, 15))
    assert list(strata(ten, "step")) == [str(step) for step in range(5, 15)]
    eleven = Population({"a": (1,)}, None, range(0, 22, 2))
    assert list(strata(eleven, "step")) == ["0", "2", "4", "6", "8", "10", "12", "14", "16", "18-20"]


@pytest.mark.parametrize(("population", "weight", "stratify"), EACH_WAY)
def test_every_address_is_in_one_of_the_strata(population, weight, stratify):
    found = {stratum_of(address, population, stratify) for address in in_order(population, 0, weight, stratify)}
    empty = {"a", "c"} if population is SMALL[3] and stratify in ("tensor", "layer") else set()
    assert found == set(strata(population, stratify)) - empty


@pytest.mark.parametrize("length", [*range(1, 40), 997])
def test_bins_of_steps_are_equal_and_cover_each_step(length):
    population = Population({"a": (1,)}, None, range(3, 3 + 2 * length, 2))
    found = {step: stratum_of(Address("a", 0, None, step), population, "step") for step in population.steps}
    for step, name in found.items():
        first, _, last = name.partition("-")
        assert int(first) <= step <= int(last or first)
    sizes = Counter(found.values())
    assert list(sizes) == list(strata(population, "step")) and len(sizes) == min(length, 10)
    assert max(sizes.values()) - min(sizes.values()) <= 1


# --- the same on every machine -----------------------------------------------------------------------------------


GOLDEN = {
    ("size", "none"): [
        ("positions", 7, 15, 294),
        ("blocks.0.feedforward.up", 14157, 12, 184),
        ("positions", 2447, 1, 221),
    ],
    ("size", "tensor"): [
        ("blocks.10.attention.query", 1336, 1, 198),
        ("blocks.0.feedforward.up", 14895, 7, 103),
        ("blocks.0.attention.query", 1152, 26, 225),
    ],
    ("size", "layer"): [
        ("blocks.10.attention.query", 1423, 17, 296),
        ("blocks.1.attention.query", 3911, 11, 139),
        ("blocks.0.attention.query", 1019, 24, 151),
    ],
    ("size", "bit"): [
        ("blocks.0.feedforward.up", 10551, 5, 167),
        ("embedding", 7735, 30, 153),
        ("blocks.0.feedforward.up", 5130, 2, 228),
    ],
    ("size", "step"): [
        ("embedding", 740, 24, 228),
        ("blocks.0.feedforward.up", 8499, 6, 327),
        ("blocks.0.attention.query", 1852, 7, 262),
    ],
    ("tensor", "none"): [
        ("blocks.0.feedforward.up", 12747, 12, 305),
        ("positions", 3608, 21, 331),
        ("blocks.0.feedforward.up", 13966, 31, 177),
    ],
    ("tensor", "tensor"): [
        ("blocks.10.attention.query", 1226, 3, 308),
        ("blocks.0.feedforward.up", 6802, 8, 320),
        ("blocks.0.attention.query", 559, 21, 187),
    ],
    ("tensor", "layer"): [
        ("blocks.10.attention.query", 3803, 31, 187),
        ("blocks.1.attention.query", 763, 10, 108),
        ("blocks.0.attention.query", 1108, 21, 167),
    ],
    ("tensor", "bit"): [
        ("final_norm", 29, 5, 288),
        ("blocks.10.attention.query", 2082, 30, 174),
        ("head", 10610, 2, 295),
    ],
    ("tensor", "step"): [
        ("positions", 1089, 23, 233),
        ("head", 12210, 10, 327),
        ("blocks.1.attention.query", 172, 3, 252),
    ],
}


@pytest.mark.parametrize(("weight", "stratify"), each_way(LARGE))
def test_the_sample_of_a_seed_is_what_it_always_was(weight, stratify):
    """If this fails, stored campaigns no longer say what was drawn: bring the old order back."""
    drawn = [(a.tensor, a.element, a.bit, a.step) for a in sample(LARGE, 3, 2024, weight, stratify)]
    assert drawn == GOLDEN[weight, stratify]


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "stratify"), each_way(SMALL[0]))
@pytest.mark.parametrize("count", [SMALL[0].size + 1, -1])
def test_samples_that_there_are_not_are_refused(weight, stratify, count):
    size = SMALL[0].size
    with pytest.raises(
        ConfigError, match=rf"^fault\.samples={count}: .*{size} different faults; allowed: 0 to {size}$"
    ):
        sample(SMALL[0], count, 0, weight, stratify)


def test_nothing_to_draw_from_gives_nothing():
    for population in (Population({}, (1,), range(5)), Population({"a": (3,)}, (1,), range(0))):
        assert population.size == 0
        assert all(sample(population, 0, 0, *way) == [] for way in each_way(population))
        with pytest.raises(ConfigError, match=r"^fault\.samples=1: .*; allowed: 0 to 0$"):
            sample(population, 1, 0)


def test_unknown_words_and_missing_bits_are_refused():
    with pytest.raises(ConfigError, match=r"^fault\.weight=area: unknown; allowed: size, tensor$"):
        sample(LARGE, 1, 0, weight="area")
    with pytest.raises(ConfigError, match=r"^fault\.stratify=rank: unknown; allowed: none, tensor, layer, bit, step$"):
        strata(LARGE, "rank")
    with pytest.raises(ConfigError, match=r"^fault\.stratify=bit: .*; allowed: none, tensor, layer, step$"):
        list(islice(in_order(SMALL[1], 0, stratify="bit"), 1))


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (5, 10), (1, 7), (50, 100), (700, 1000), (9999, 10_000)])
def test_half_width_is_that_of_scipys_wilson_interval(hits, count):
    interval = binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert half_width(count, hits / count) == pytest.approx((interval.high - interval.low) / 2, rel=1e-12)


def test_half_width_of_no_samples_is_everything():
    assert half_width(0) == pytest.approx(0.5)


# --- several number formats --------------------------------------------------------------------------------------

MIXED = Population(
    {"norm": (30,), "blocks.0.a": (20, 3), "head": (10,)},
    {"fp32": tuple(range(32)), "bf16": tuple(range(16)), "fp64": tuple(range(64))},
    range(4, 6),
    formats={"norm": "fp32", "blocks.0.a": "bf16", "head": "fp64"},
)


@pytest.mark.parametrize("stratify", ["none", "tensor", "layer", "bit", "step"])
@pytest.mark.parametrize("weight", ["size", "tensor"])
def test_every_bit_of_every_format_comes_once(weight, stratify):
    drawn = list(in_order(MIXED, 3, weight, stratify))
    sizes = {name: math.prod(shape) for name, shape in MIXED.shapes.items()}
    assert len(drawn) == MIXED.size == 2 * (30 * 32 + 60 * 16 + 10 * 64) == len(set(drawn))
    for name, form in MIXED.formats.items():
        own = [address for address in drawn if address.tensor == name]
        assert {address.bit for address in own} == set(MIXED.bits[form]) and {address.format for address in own} == {
            form
        }
        assert {address.element for address in own} == set(range(sizes[name]))
    assert sample(MIXED, 100, 3, weight, stratify) == drawn[:100]


def test_an_element_is_as_likely_as_any_other_whatever_its_bits():
    """And then each of its own bits: not each bit of the memory, of which fp64 has most."""
    shapes = {"norm": (3000,), "blocks.0.a": (60, 100), "head": (1000,)}
    population = dataclasses.replace(MIXED, shapes=shapes, steps=range(1))
    drawn = sample(population, 20_000, 11)
    for name, shape in shapes.items():
        own = [address for address in drawn if address.tensor == name]
        share, bits = math.prod(shape) / 10_000, len(MIXED.bits[MIXED.formats[name]])
        assert abs(len(own) / len(drawn) - share) < 4 * math.sqrt(share * (1 - share) / len(drawn))
        of_bit = np.bincount([address.bit for address in own], minlength=bits)
        assert len(of_bit) == bits and chisquare(of_bit).pvalue > 1e-3


def test_a_bit_of_each_format_is_a_stratum():
    found = strata(MIXED, "bit")
    assert len(found) == 16 + 32 + 64 and found["bf16 14"].size == 60 * 2
    assert all(stratum_of(part.address(0), MIXED, "bit") == name for name, part in found.items())
