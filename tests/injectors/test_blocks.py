"""Number formats with a scale for each block of elements, as 8-bit optimizers keep their state."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from harness.faults.facts import Facts
from harness.testing import engine
from harness.training.config_checks import check_trial
from harness.training.sites import Event, Site, SiteCall
from injectors.value import Value
from injectors.value_strike import StrikeTarget

TYPES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "fp16": np.float16}
MOST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp16": 65504.0}
BLOCK = 8


def values(size: int = 44, seed: int = 0) -> np.ndarray:
    """Like a second moment: of very different sizes; the last block is not full."""
    return np.exp(np.random.default_rng(seed).normal(-25, 4, size)).astype(np.float32)


def struck(
    whole: np.ndarray, elements: list[int] | None, mask: int = 0, **fields: Any
) -> tuple[np.ndarray, list[Event]]:
    fault = Value(site="moment_2", start=0, elements=None if elements is None else 1, **fields)
    facts = Facts(1, {"x": whole.shape})
    if elements is None:
        strike = fault.arm(facts)
    else:
        target = StrikeTarget("x", np.array(elements), np.full(len(elements), mask, dtype=np.int64))
        strike = fault.strike_at((target,), facts)
    tensor = torch.from_numpy(whole.copy())
    events = strike.strike(SiteCall(Site.MOMENT_2, 0, {"x": tensor}, 0))
    return tensor.numpy(), events


def kept(whole: np.ndarray, name: str, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Each element's number in the format, and the scale of its block: what an 8-bit optimizer has of them."""
    scales = np.concatenate(
        [np.full(len(x), MOST[name] / np.abs(x).max()) for x in np.split(whole, range(block, len(whole), block))]
    )
    return (whole.astype(np.float64) * scales).astype(TYPES[name]), scales


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("element", [0, 7, 8, 21, 43])
def test_a_bit_flips_in_the_number_that_the_block_keeps(name: str, element: int) -> None:
    whole = values()
    numbers, scales = kept(whole, name)
    words = numbers.view(np.uint16 if name == "fp16" else np.uint8)
    for bit in range(8 * words.itemsize):
        flipped = (words ^ words.dtype.type(1 << bit)).view(numbers.dtype).astype(np.float64)
        expected = whole.copy()
        with np.errstate(over="ignore"):
            expected[element] = flipped[element] / scales[element]
        found, (event,) = struck(whole, [element], 1 << bit, format=name, block=BLOCK, bit=bit)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert event.index == (element,) and event.bit == bit and event.was_zero == (numbers[element] == 0)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("block", [1, 5, 8, 44, 1000])
def test_rounding_of_a_whole_tensor(name: str, block: int) -> None:
    whole = values().reshape(4, 11)
    numbers, scales = kept(whole.ravel(), name, block)
    found, _ = struck(whole, None, model="round", format=name, block=block)
    assert found.shape == (4, 11)
    np.testing.assert_allclose(found.ravel(), numbers.astype(np.float64) / scales, rtol=1e-6)


def test_many_elements_of_several_blocks_and_of_one(name: str = "fp8_e5m2") -> None:
    """A tensor of many blocks, of which few are looked at, and one whose blocks are looked at all at once."""
    for size, elements in ((10_000, [3, 4, 5000, 9999]), (40, [0, 9, 17, 39])):
        whole = values(size)
        numbers, scales = kept(whole, name)
        found, _ = struck(whole, elements, 0x80, format=name, block=BLOCK, bit=7)
        expected = whole.copy()
        expected[elements] = (-numbers.astype(np.float64) / scales)[elements]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("poison", [0.0, np.inf, np.nan])
def test_a_block_of_zeros_and_one_that_is_not_finite_have_no_scale(poison: float) -> None:
    whole = values()
    whole[8:16] = 0.0
    whole[9] = poison
    found, _ = struck(whole, [10], 0x3C, format="fp8_e5m2", block=BLOCK)
    assert found[10] == 1.0, "the bits of 1.0, where all were 0"


def test_what_no_bit_changes_stays_as_it_was() -> None:
    whole = values()
    found, (event,) = struck(whole, [5], 0x80, model="stuck_at_0", format="fp8_e4m3", block=BLOCK)
    assert np.array_equal(found, whole) and not event.changed


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_most_of_a_second_moment_is_zero_without_a_scale_and_little_with_one(format: str) -> None:
    """That of a GPT after 20 steps of AdamW."""
    pack = engine.run([engine.trial(seed=r, steps=20, width=32) for r in range(2)], block=20).pack
    moment = pack.slot("moment_2", 0)["blocks.0.feedforward.up"].numpy()
    elements = list(range(0, moment.size, 7))
    shares = {}
    for block in (None, 64):
        _, events = zip(*(struck(moment, [one], 1, format=format, block=block, bit=0) for one in elements), strict=True)
        shares[block] = np.mean([event.was_zero for (event,) in events])
    assert shares[64] < 0.25 and shares[None] > 0.95, shares


def test_a_run_with_a_strike_in_blocks_is_that_of_its_twin_before_and_has_its_record() -> None:
    golden = engine.trial(steps=12)
    check_trial(golden)
    fault = Value(
        kind="value", name="value", site="moment_2", start=6, format="fp8_e5m2", block=64, bit=6, tensor="head"
    )
    run = engine.run([golden, dataclasses.replace(golden, fault=fault.resolved())], forks=True)
    (event,) = run.result.events[1]
    assert event.changed and event.was_zero in (True, False) and run.result.changes == [0, 1]
    assert np.array_equal(run.signals["loss"][0, :7], run.signals["loss"][1, :7])
