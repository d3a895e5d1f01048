"""Faults in the number format that a tensor is held in, against numpy and ml_dtypes, which do the same to its bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import ConfigError
from harness.config.formats import HELD
from harness.training.sites import Event, Site
from injectors import Armed, Facts, formats_of, shapes_of
from injectors.realistic import RealisticSDC
from injectors.value import Value
from tests.number_formats import BITS, MANTISSA, NUMPY, TORCH, UNSIGNED, tensor_of, words_of

SIZE = 24


def numbers(name: str) -> Tensor:
    """[24] numbers of a format, of many sizes and both signs, and zero."""
    values = np.random.default_rng(3).normal(0, 1, SIZE) * 2.0 ** np.arange(-6, 6).repeat(2)
    values[5] = 0.0
    return tensor_of(values.astype(NUMPY[name]).view(UNSIGNED[BITS[name]]).astype(np.uint64), name)


def struck(fault: Value | RealisticSDC, x: Tensor, site: str = "weight") -> tuple[Tensor, list[Event]]:
    """What a fault makes of a model's only tensor, whose format the facts tell."""
    held = {"x": x.clone()}
    facts = Facts(1, shapes_of(held), slots=("moment_2",), formats={site: formats_of(held)}, seed=4)
    events = Armed(fault, facts).strike(site, 0, held)
    return held["x"], events


def in_numpy(x: Tensor, name: str) -> np.ndarray:
    return words_of(x).astype(UNSIGNED[BITS[name]]).view(NUMPY[name])


# --- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HELD)
def test_every_bit_of_a_format_flips_and_each_changes_the_number(name: str) -> None:
    x = numbers(name)
    for bit in range(BITS[name]):
        found, (event,) = struck(Value(start=0, element=7, bit=bit), x)
        before, after = int(words_of(x)[7]), int(words_of(found)[7])
        assert before ^ after == 1 << bit and event.changed
        assert np.flatnonzero(words_of(x) != words_of(found)).tolist() == [7]
        digits = BITS[name] // 4
        assert (event.bits_before, event.bits_after) == (f"{before:0{digits}x}", f"{after:0{digits}x}")
        assert (event.format, event.bit, event.mask) == (name, bit, f"{1 << bit:x}")
        assert np.array_equal(float(event.after), float(in_numpy(found, name)[7]), equal_nan=True)


@pytest.mark.parametrize("name", HELD)
def test_drawn_bits_are_all_bits_of_the_format_and_no_other(name: str) -> None:
    x = numbers(name)
    drawn = {struck(Value(start=0, element=7), x)[1][0].bit}
    facts = [Facts(1, {"x": (SIZE,)}, formats={"weight": {"x": name}}, seed=seed) for seed in range(12 * BITS[name])]
    masks = [int(Value(start=0, element=7).arm(one).targets[0].masks[0]) % 2**64 for one in facts]
    drawn |= {mask.bit_length() - 1 for mask in masks}
    assert drawn == set(range(BITS[name]))


@pytest.mark.parametrize("name", HELD)
def test_the_last_bit_is_one_unit_in_the_last_place(name: str) -> None:
    """Of that format, which is the distance to a neighbour of the number there."""
    x = numbers(name)
    element = 9
    found, (event,) = struck(Value(start=0, element=element, bit=0), x)
    before, after = float(in_numpy(x, name)[element]), float(in_numpy(found, name)[element])
    ulp = 2.0 ** (math.frexp(before)[1] - 1 - MANTISSA[name])
    assert abs(after - before) == ulp and event.changed


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("model", ["stuck_at_0", "stuck_at_1"])
def test_a_bit_is_stuck(name: str, model: str) -> None:
    x = numbers(name)
    bit = MANTISSA[name] - 1
    found, _ = struck(Value(start=0, elements=None, model=model, bit=bit), x)
    mask = np.uint64(1 << bit)
    words = words_of(x)
    assert np.array_equal(words_of(found), words | mask if model == "stuck_at_1" else words & ~mask)


@pytest.mark.parametrize("name", HELD)
def test_bits_are_counted_from_the_top_too(name: str) -> None:
    x = numbers(name)
    for below in (-1, -2, -BITS[name]):
        found, (event,) = struck(Value(start=0, element=3, bit=below), x)
        assert event.bit == BITS[name] + below
        assert int(words_of(x)[3] ^ words_of(found)[3]) == 1 << event.bit


@pytest.mark.parametrize("name", HELD)
def test_several_scattered_bits_and_those_of_a_gate(name: str) -> None:
    x = numbers(name)
    found, (event,) = struck(Value(start=0, element=3, bits=4, spread="scattered"), x)
    changed = int(words_of(x)[3] ^ words_of(found)[3])
    assert changed == int(event.mask or "", 16) and changed.bit_count() == 4
    found, events = struck(RealisticSDC(start=0, nonfinite=0, single=0, elements=3), x)
    for event in events:
        (place,) = event.index or ()
        assert int(words_of(x)[place] ^ words_of(found)[place]) == int(event.mask or "", 16) < 1 << BITS[name]
        assert event.format == name


# --- numbers -----------------------------------------------------------------------------------------------------


def expected(x: np.ndarray, name: str, model: str) -> np.ndarray:
    """In float64, rounded once; in float32 where torch scales numbers of the format so."""
    wide = x.astype(np.float64)
    if model == "scale":
        in_between = np.float64 if name == "fp64" else np.float32
        return (x.astype(in_between) * in_between(0.3)).astype(NUMPY[name])
    found = {"zero": 0 * wide, "nan": wide + np.nan, "set": 0 * wide + 0.3, "sign": -wide, "round": wide}[model]
    return (found + 0.0 if model in ("zero", "set") else found).astype(NUMPY[name])


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("model", ["zero", "nan", "set", "scale", "sign", "round"])
def test_numbers_are_computed_in_the_format(name: str, model: str) -> None:
    x = numbers(name)
    found, (event,) = struck(Value(start=0, elements=None, model=model, value=0.3), x)
    wanted = expected(in_numpy(x, name), name, model)
    np.testing.assert_array_equal(in_numpy(found, name).astype(np.float64), wanted.astype(np.float64))
    assert found.dtype == TORCH[name] and event.format == name and event.changed == (model != "round")


@pytest.mark.parametrize("name", HELD)
def test_noise_is_rounded_once(name: str) -> None:
    """The same noise in each format: what float64 has, to half a unit in the last place."""
    exact = numbers(name).double()
    noisy, _ = struck(Value(start=0, elements=None, model="noise", value=0.25), exact)
    found, _ = struck(Value(start=0, elements=None, model="noise", value=0.25), numbers(name))
    noise = (noisy - exact).numpy()
    assert 0.1 < noise.std() < 0.5
    wanted = (exact.numpy() + noise).astype(NUMPY[name]).astype(np.float64)
    if name == "fp32":  # as a sweep has it, the noise is rounded before it is added
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=2**-22, atol=2**-24)
    else:
        np.testing.assert_array_equal(found.double().numpy(), wanted)


@pytest.mark.parametrize("name", [name for name in HELD if name != "fp8_e4m3"])
def test_an_infinity(name: str) -> None:
    found, _ = struck(Value(start=0, element=2, model="minus_infinity"), numbers(name))
    assert found.float()[2] == -math.inf


def test_no_float64_passes_through_float32() -> None:
    x = torch.tensor([1.0 + 2**-50, 1e300, 1e-300, -3.0 - 2**-49], dtype=torch.float64)
    for model in ("bit_flip", "scale", "sign", "noise"):
        fault = Value(start=0, elements=None, model=model, value=0.5, bit=3 if model == "bit_flip" else None)
        found, _ = struck(fault, x, "moment_2")
        assert found.isfinite().all() and not torch.equal(found, found.float().double()), model
    found, (event,) = struck(Value(start=0, element=2, bit=63), x)
    assert found[2] == -1e-300 and event.was_zero is False and event.mask == f"{1 << 63:x}"


@pytest.mark.parametrize("name", HELD)
def test_an_update_is_struck_in_its_own_format(name: str) -> None:
    origin = numbers(name)
    moved = {"x": expected_tensor(in_numpy(origin, name).astype(np.float64) * 0.5, name)}
    facts = Facts(1, {"x": (SIZE,)}, formats={"weight": {"x": name}})
    armed = Armed(Value(start=0, site="update", element=4, bit=-1), facts)
    armed.strike("before_update", 0, {"x": origin})
    golden = float(moved["x"].double()[4])
    (event,) = armed.strike("update", 0, moved)
    update = golden - float(origin.double()[4])
    assert (float(event.before), float(event.after)) == (update, -update)
    wanted = expected_tensor(np.array([float(origin.double()[4]) - update]), name)
    assert float(moved["x"].double()[4]) == float(wanted.double())


def expected_tensor(values: np.ndarray, name: str) -> Tensor:
    return tensor_of(values.astype(NUMPY[name]).view(UNSIGNED[BITS[name]]).astype(np.uint64), name)


# --- another format than the tensor's ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "format"), [("fp64", "fp32"), ("fp32", "bf16"), ("fp64", "fp8_e5m2"), ("bf16", "fp8_e4m3")]
)
def test_a_narrower_format_is_emulated(held: str, format: str) -> None:
    x = numbers(held)
    found, (event,) = struck(Value(start=0, element=7, bit=1, format=format), x)
    inside = in_numpy(x, held).astype(NUMPY[format]).view(UNSIGNED[BITS[format]])[7]
    wanted = (inside ^ inside.dtype.type(2)).view(NUMPY[format]).astype(NUMPY[held])
    assert float(in_numpy(found, held)[7]) == float(wanted) and event.format == format


REFUSED: dict[str, tuple[str, Value, str]] = {
    "a bit of fp32": (
        "bf16",
        Value(start=0, bit=16),
        "fault.bit=16: beyond bf16, in which it is held; allowed: 0 to 15",
    ),
    "from the top": (
        "fp16",
        Value(start=0, bit=-17),
        "fault.bit=-17: beyond fp16, in which it is held; allowed: 0 to 15",
    ),
    "of 8 bits": (
        "fp8_e5m2",
        Value(start=0, bit=8),
        "fault.bit=8: beyond fp8_e5m2, in which it is held; allowed: 0 to 7",
    ),
    "a wider format": (
        "bf16",
        Value(start=0, format="fp32"),
        "fault.format=fp32: x is held in bf16, which has other bits; allowed: null, bf16, fp8_e4m3, fp8_e5m2",
    ),
    "fp16 in bf16": (
        "bf16",
        Value(start=0, format="fp16"),
        "fault.format=fp16: x is held in bf16, which has other bits",
    ),
    "an infinity": (
        "fp8_e4m3",
        Value(start=0, model="infinity"),
        "fault.model=infinity: x is held in fp8_e4m3, which has no infinity; allowed: nan, or set",
    ),
    "too large": (
        "fp16",
        Value(start=0, model="set", value=7e4),
        "fault.value=70000.0: infinite in fp16; allowed: at most",
    ),
    "blocks": ("bf16", Value(start=0, block=4), "fault.block=4: fault.format=null needs no scale; allowed: null, or a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_does_not_have_is_refused(case: str) -> None:
    name, fault, reason = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        struck(fault, numbers(name))
    (line,) = caught.value.reasons
    assert line.startswith(reason), line


def test_facts_that_leave_the_format_out_change_nothing_in_silence() -> None:
    facts = Facts(1, {"x": (SIZE,)})
    with pytest.raises(
        ConfigError, match="fault.tensor=x: its numbers are bf16 at the site weight, .* say fp32; allowed"
    ):
        Armed(Value(start=0, element=3), facts).strike("weight", 0, {"x": numbers("bf16")})
    integers = {"x": torch.arange(SIZE)}
    with pytest.raises(ConfigError, match="fault.tensor=x: its numbers are int64; allowed: fp64, fp32, bf16"):
        Armed(Value(start=0, element=3), facts).strike("weight", 0, integers)
    assert integers["x"].equal(torch.arange(SIZE)) and shapes_of(integers) == {} == formats_of(integers)


def test_both_parts_of_a_complex_number_are_struck() -> None:
    weights = {
        "z": torch.nn.Parameter(torch.randn(3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)))
    }
    facts = Facts(1, shapes_of(weights), formats={"weight": formats_of(weights)})
    assert (facts.tensors, facts.formats) == ({"z": (3, 2)}, {"weight": {"z": "fp64"}})
    before = weights["z"].detach().clone()
    (event,) = Armed(Value(start=0, element=5, bit=63), facts).strike("weight", 0, weights)
    assert event.index == (2, 1) and weights["z"][2] == before[2].conj() and torch.equal(weights["z"][:2], before[:2])
    with pytest.raises(
        ConfigError, match=r"fault.tensor=z: its numbers are complex, .* say \[3\]; allowed: .*\[3, 2\]"
    ):
        Armed(Value(start=0, element=1), Facts(1, {"z": (3,)})).strike("weight", 0, weights)


def test_a_glob_over_several_formats_draws_bits_of_each() -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (60,), "b": (30,), "c": (10,)}
    formats = {"a": "bf16", "b": "fp32", "c": "fp64"}
    drawn: dict[str, list[int]] = {name: [] for name in shapes}
    for seed in range(3000):
        facts = Facts(1, shapes, formats={"weight": formats}, seed=seed)
        (target,) = Value(start=0).arm(facts).targets
        drawn[target.tensor].append((int(target.masks[0]) % 2**64).bit_length() - 1)
    for name, share in {"a": 0.6, "b": 0.3, "c": 0.1}.items():
        assert len(drawn[name]) / 3000 == pytest.approx(share, abs=0.04), "elements are alike, whatever their bits"
        assert max(drawn[name]) == BITS[formats[name]] - 1 and min(drawn[name]) == 0
    with pytest.raises(ConfigError) as caught:
        Value(start=0, bit=20).check(Facts(1, shapes, formats={"weight": formats}))
    assert caught.value.reasons == ("fault.bit=20: beyond bf16, in which it is held; allowed: 0 to 15",)


def test_a_replay_says_which_format() -> None:
    _, (event,) = struck(Value(start=0, element=3, bit=1), numbers("bf16"))
    stored: dict[str, Any] = event.to_dict()
    assert stored["format"] == "bf16" and Event.from_dict(stored) == event
    del stored["format"]
    assert Event.from_dict(stored).format is None, "an older record"
    assert event.site == Site.WEIGHT
