"""The realistic mix of corruption: its shares over thousands of faults, in their exact binomial intervals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import binom

from harness.training.sites import Site
from injectors.realistic import RealisticSDC
from tests.injectors.spies import START, differing, row, strike, trial, watch, words

SIZES = {"small": 1024, "large": 3072}
STRIDES = (16, 32, 64, 128)
RARE = 1e-6  # chance that a test of draws fails by chance, were its seeds new ones


@dataclass(frozen=True)
class Struck:
    """What one fault did to tensors of zeros."""

    tensor: str
    places: tuple[int, ...]
    values: tuple[float, ...]
    masks: tuple[int, ...]

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.values).all()) or max(self.masks) != min(self.masks)

    @property
    def bits(self) -> set[int]:
        return {mask.bit_count() for mask in self.masks}


def struck(count: int, sizes=SIZES, **fields) -> list[Struck]:
    """One fault for each of so many seeds. Zeros, so that what flips is what stands there afterwards."""
    found = []
    for seed in range(count):
        x = {name: torch.zeros(size) for name, size in sizes.items()}
        events = strike(RealisticSDC(**fields), x, seed)
        (name,) = {event.tensor for event in events}
        places = np.flatnonzero(words(x[name]))
        assert not any(other.any() for key, other in x.items() if key != name), "one tensor"
        values, masks = x[name].numpy()[places], words(x[name])[places]
        found.append(Struck(name, *(tuple(part.tolist()) for part in (places, values, masks))))
    return found


def assert_share(count: int, of: int, share: float) -> None:
    low, high = binom.interval(1 - RARE, of, share)
    assert low <= count <= high, f"{count} of {of}, expected a share of {share}"


def test_shares_of_a_field_study():
    """Non-finite 1%; of the others a single bit in 40%, else two to four bits, each as often."""
    n = 4000
    faults = struck(n)
    finite = [fault for fault in faults if fault.is_finite]
    assert_share(n - len(finite), n, 0.01)
    assert all(len(fault.bits) == 1 for fault in finite), "as many bits in each element of a fault"
    counts = Counter(next(iter(fault.bits)) for fault in finite)
    assert_share(counts[1], len(finite), 0.4)
    assert set(counts) == {1, 2, 3, 4}
    for bits in (2, 3, 4):
        assert_share(counts[bits], len(finite), 0.6 / 3)


def test_addresses_are_periodic_and_anywhere():
    """Four elements, one of four strides apart, around the end of the tensor too."""
    n = 2000
    faults, strides, wrapped = struck(n, nonfinite=0), Counter(), 0
    for fault in faults:
        size = SIZES[fault.tensor]
        gaps = sorted((b - a) % size for a, b in zip(fault.places, (*fault.places[1:], fault.places[0]), strict=True))
        assert len(gaps) == 4 and gaps[0] == gaps[2]
        strides[gaps[0]] += 1
        wrapped += fault.places[-1] - fault.places[0] > 3 * 128
    assert set(strides) == set(STRIDES) and wrapped
    for stride in STRIDES:
        assert_share(strides[stride], n, 1 / 4)
    assert_share(sum(fault.tensor == "small" for fault in faults), n, 1024 / 4096)
    firsts = [first(fault) for fault in faults if fault.tensor == "large"]
    for quarter in range(4):
        assert_share(sum(place // 768 == quarter for place in firsts), len(firsts), 1 / 4)


def first(fault: Struck) -> int:
    """The element from which the others follow at its stride."""
    size = SIZES[fault.tensor]
    (found,) = {p for p in fault.places for s in STRIDES if {(p + i * s) % size for i in range(4)} == {*fault.places}}
    return found


def test_bits_of_each_element_are_drawn_apart():
    counts = Counter(mask.bit_length() - 1 for fault in struck(1500, nonfinite=0, single=1) for mask in fault.masks)
    total = sum(counts.values())
    assert total == 6000 and set(counts) == set(range(32))
    for bit in range(32):
        assert_share(counts[bit], total, 1 / 32)


def test_what_is_not_finite_is_one_of_three_kinds():
    n = 900
    kinds = Counter(repr(value) for fault in struck(n, nonfinite=1) for value in set(map(repr, fault.values)))
    assert set(kinds) == {"'nan'", "'inf'", "'-inf'"} and sum(kinds.values()) == n, "one kind in a fault"
    for count in kinds.values():
        assert_share(count, n, 1 / 3)


@pytest.mark.parametrize(("single", "most", "counts"), [(1.0, 8, {1}), (0.0, 2, {2}), (0.0, 8, set(range(2, 9)))])
def test_its_shares_can_be_set(single, most, counts):
    faults = struck(300, nonfinite=0, single=single, most=most)
    assert set().union(*(fault.bits for fault in faults)) == counts


@pytest.mark.parametrize("elements", [1, 3, 16])
def test_the_number_of_elements(elements):
    """Distinct ones; a stride that wraps around a small tensor meets itself."""
    assert {len(fault.places) for fault in struck(100, elements=elements, sizes={"x": 4096})} == {elements}
    assert {len(fault.places) for fault in struck(100, elements=4, sizes={"x": 64}, nonfinite=0)} == {4, 2, 1}


def test_bits_of_a_narrow_format():
    """Eight bits, so zeros become numbers that the format has."""
    faults = struck(300, format="fp8_e5m2", nonfinite=0, single=1)
    values = {abs(value) for fault in faults for value in fault.values}
    assert values == {0.0, *(2.0**-16 * 2**i for i in range(2)), *(2.0 ** (2**i - 15) for i in range(5))}


def test_the_record_says_which_bits():
    """And none where NaN was written."""
    for nonfinite in (0, 1):
        fault = RealisticSDC(start=START, tensor="*.up", nonfinite=nonfinite)
        run, spy = watch([trial(), trial(fault)], [Site.WEIGHT])
        golden, found = (row(spy.arrays[Site.WEIGHT, START, 0], r) for r in (0, 1))
        changed = differing(golden, found)
        assert sum(map(len, changed.values())) == 4 == len(run.result.events[1])
        for event in run.result.events[1]:
            before, after = (words(x[event.tensor][event.index].reshape(1))[0] for x in (golden, found))
            assert (event.bits_before, event.bits_after) == (f"{before:08x}", f"{after:08x}")
            assert event.mask == (None if nonfinite else f"{before ^ after:x}")
            assert event.bit is None or 1 << event.bit == int(event.mask, 16)
