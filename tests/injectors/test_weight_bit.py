"""Bit flips, against Python's own view of the bits of a float."""

from __future__ import annotations

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch

from harness.config import ConfigError, Data, Model, Train, Trial
from harness.corpus import load_corpus
from harness.pack import Pack
from harness.sites import Agenda, Site
from injectors.fault import FaultContext, shapes_of
from injectors.weight_bit import WeightBit

WORDS = {
    "one": 0x3F800000,
    "a weight": 0xBE99999A,
    "zero": 0x00000000,
    "minus zero": 0x80000000,
    "smallest subnormal": 0x00000001,
    "a subnormal": 0x80123456,
    "largest subnormal": 0x007FFFFF,
    "smallest normal": 0x00800000,
    "largest": 0x7F7FFFFF,
    "infinity": 0x7F800000,
    "minus infinity": 0xFF800000,
    "quiet NaN": 0x7FC00000,
    "signalling NaN": 0x7F800001,
    "NaN with a payload": 0xFFC12345,
}
SHAPES = {"head": (7, 3), "blocks.0.up": (5, 4), "blocks.0.norm": (6,), "blocks.1.up": (50, 40)}


def context(seed=0, shapes=None):
    return FaultContext(shapes or SHAPES, np.ones(3, np.int64), seed)


def strike(fault, tensors, step=0):
    return fault.arm(context(shapes={name: tuple(x.shape) for name, x in tensors.items()})).strike(tensors, step)


def words(x):
    """The bits of an fp32 tensor, unsigned."""
    return x.detach().contiguous().numpy().view(np.uint32)


def from_words(values, shape):
    return torch.from_numpy(np.array(values, np.uint32).view(np.float32)).reshape(shape)


def as_float(word):
    return struct.unpack("<f", struct.pack("<I", word))[0]


@pytest.mark.parametrize("bit", range(32))
def test_one_bit_of_one_element_flips(bit):
    """Every bit of every kind of number, and no other element of any tensor."""
    for address, (name, word) in enumerate(WORDS.items()):
        target = from_words(list(WORDS.values()), (7, 2))
        other = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
        tensors = {"target": target, "other": other}
        before = {key: words(x).copy() for key, x in tensors.items()}
        (event,) = strike(WeightBit(tensor="target", element=address, bit=bit), tensors, step=11)
        expected = before["target"].copy()
        expected.reshape(-1)[address] = word ^ (1 << bit)
        assert np.array_equal(words(target), expected), name
        assert np.array_equal(words(other), before["other"])

        assert (event.site, event.tensor, event.index, event.bit, event.step) == (
            Site.WEIGHT,
            "target",
            divmod(address, 2),
            bit,
            11,
        )
        assert (event.bits_before, event.bits_after) == (f"{word:08x}", f"{word ^ (1 << bit):08x}")
        assert event.changed
        for text, value in ((event.before, as_float(word)), (event.after, as_float(word ^ (1 << bit)))):
            assert float(text) == value or (math.isnan(float(text)) and math.isnan(value))
            assert math.copysign(1, float(text)) == math.copysign(1, value) or math.isnan(value)


def test_a_second_strike_flips_the_bit_back():
    tensors = {"target": torch.tensor([0.3, -0.2])}
    before = tensors["target"].clone()
    fault = WeightBit(tensor="target", element=1, bit=30, start=5, duration=2)
    (first,), (second,) = strike(fault, tensors, 5), strike(fault, tensors, 6)
    assert torch.equal(tensors["target"], before)
    assert (first.bits_before, first.bits_after) == (second.bits_after, second.bits_before)
    assert first.changed and second.changed


def test_it_is_due_at_its_steps_and_site():
    injector = WeightBit(tensor="head", start=3, duration=4).arm(context())
    assert injector.site == Site.WEIGHT and list(injector.steps) == [3, 4, 5, 6]
    agenda = Agenda([None, injector])
    due = {(site, step) for site in Site for step in range(20) if agenda.due(site, step)}
    assert due == {(Site.WEIGHT, step) for step in (3, 4, 5, 6)}


def address(fault, seed):
    injector = fault.arm(context(seed))
    return injector.tensor, injector.element


def test_the_address_follows_from_the_seed():
    fault = WeightBit(tensor="blocks.*")
    assert [address(fault, seed) for seed in range(50)] == [address(fault, seed) for seed in range(50)]
    assert len({address(fault, seed) for seed in range(50)}) > 40
    later = dataclasses.replace(fault, start=7, bit=3, duration=2)
    assert address(later, 4) == address(fault, 4), "the same seed is the same address at any step and bit"


def test_the_tensor_is_drawn_by_its_size_from_those_that_match():
    drawn = [address(WeightBit(tensor="blocks.*"), seed) for seed in range(400)]
    counts = {name: sum(tensor == name for tensor, _ in drawn) for name in SHAPES}
    assert counts["head"] == 0
    assert counts["blocks.1.up"] > 380  # 2000 of 2026 elements: 395 expected
    assert all(0 <= element < math.prod(SHAPES[tensor]) for tensor, element in drawn)
    elements = [element for tensor, element in drawn if tensor == "blocks.1.up"]
    assert min(elements) < 100 and max(elements) > 1900, "elements come from the whole tensor"


def test_a_given_element_is_kept():
    assert {address(WeightBit(tensor="head", element=20), seed) for seed in range(9)} == {("head", 20)}


def test_only_the_struck_trial_changes():
    trial = Trial(
        Model(width=16, head_dim=8, context=8), train=Train(batch=2), data=Data("zipf", vocabulary=64, length=2000)
    )
    corpus = load_corpus(trial.data, 8)
    pack = Pack([trial] * 3, corpus, torch.device("cpu"))
    before = words(pack.weights).copy()
    fault = WeightBit(tensor="blocks.1.attention.key", element=37, bit=12)
    injector = fault.arm(FaultContext(shapes_of(trial, 64), corpus.counts, 0))
    injector.strike(pack.tensors(pack.weights, 1), 0)
    changed = np.argwhere(words(pack.weights) != before)
    assert changed.tolist() == [[1, pack.layout.offsets["blocks.1.attention.key"] + 37]]


def test_what_it_refuses():
    trial, shapes = Trial(), {"head": (7, 3), "blocks.0.up": (5, 4)}
    WeightBit(tensor="*", element=19).check(trial, shapes)
    with pytest.raises(ConfigError, match=r"fault.element=20: .*smallest match has 20.*allowed: 0 to 19"):
        WeightBit(tensor="*", element=20).check(trial, shapes)
    with pytest.raises(ConfigError, match=r"fault.tensor=tail\*: matches no tensor.*head, blocks.0.up"):
        WeightBit(tensor="tail*").check(trial, shapes)
    with pytest.raises(ConfigError, match=r"train.precision=fp64: .*fp32, bf16"):
        WeightBit().check(Trial(train=Train(precision="fp64")), shapes)
