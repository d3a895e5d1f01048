"""Attention by Triton's programs in its interpreter, on a CPU, against torch's own operations.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1: Triton looks at it when it is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.basics import devices
from harness.kernels import attention as programs
from harness.kernels import use
from harness.model.attention import UNLIMITED, attend
from harness.model.precision import Precision
from harness.model.taps import Taps
from harness.testing import engine
from injectors.value import Value
from tests.harness.interpreting import alone, interpreted  # noqa: F401


@pytest.fixture(autouse=True)
def of_this_file_alone(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    alone(monkeypatch, "harness.model.attention")


SCORES = "a.scores"
SHAPES = [(1, 1, 1, 1, 2), (2, 1, 2, 8, 8), (3, 2, 1, 33, 16), (1, 1, 1, 65, 24), (1, 1, 1, 70, 64), (1, 1, 1, 40, 128)]
Change = Callable[[Tensor], Tensor]


def parts(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Query, key and value, and the gradient that arrives."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3].transpose(2, 3).contiguous()]


def passed(given: list[Tensor], tap: Taps | None = None, precision: Precision | None = None) -> tuple[Tensor, ...]:
    """What is mixed, and the gradients of query, key and value."""
    *read, dmixed = given
    precision = precision or Precision(read[0].dtype)
    mixed = attend(*read, 0.3, True, precision, tap or Taps([SCORES]), "a", UNLIMITED)
    return mixed.detach(), *torch.autograd.grad(mixed, read, dmixed)


def by_torch(given: list[Tensor], change: Change | None = None) -> tuple[Tensor, ...]:
    """The same by torch's operations, as an accelerator without Triton has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(use, "is_installed", lambda: False)
        return passed(given, changing(change) if change else None)


def changing(change: Change) -> Taps:
    tap = Taps([SCORES])
    tap.attach(SCORES, lambda name, x: change(x))
    return tap


def looking() -> tuple[Taps, list[Tensor]]:
    """A tap that is asked for the largest alone, and what it is given."""
    tap, given = Taps([SCORES]), []
    tap.attach_to_rows(SCORES, lambda name, x, rows: given.append(x), largest=True)
    return tap, given


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(engine.bits(x), engine.bits(y)) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shape"),
    [
        *((torch.float64, 1e-13, shape) for shape in SHAPES),
        *((torch.float32, 1e-5, shape) for shape in SHAPES[1::2]),
    ],
)
def test_values_and_gradients(dtype, tolerance, shape):
    given = parts(shape, dtype)
    for found, expected in zip(passed(given), by_torch(given), strict=True):
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_half_precision_is_rounded_where_a_cpu_emulates_it(monkeypatch, dtype, rounds):
    """Most of the values have the same bits; others were at the border of two."""
    given = parts((2, 1, 2, 40, 16), dtype)
    ours = passed(given)
    monkeypatch.setattr(devices, "CPUS", ("cpu",))
    wide = [x.detach().float().requires_grad_() for x in given]
    for found, expected in zip(ours, passed(wide, precision=Precision(torch.float32, rounds)), strict=True):
        assert found.dtype == dtype
        assert (found == expected).double().mean() > 0.9
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype"), list(zip(SHAPES[1:4], [torch.bfloat16, torch.float32, torch.bfloat16], strict=True))
)
def test_scores_that_are_stored_change_no_bit(shape, dtype):
    given, seen = parts(shape, dtype), []
    alone = passed(given)
    tap = Taps([SCORES])
    tap.attach(SCORES, lambda name, x: seen.append(x.clone()))
    assert same(alone, passed(given, tap))
    (scores,) = seen
    masked = torch.full(shape[3:4] * 2, 1.0, dtype=torch.bool).triu(1)
    assert scores.dtype == dtype and (scores[..., masked] == -math.inf).all() and scores[..., ~masked].isfinite().all()
    largest, told = looking()
    assert same(alone, passed(given, largest))
    assert told[0].shape == (*shape[:-1], 1)
    assert torch.equal(told[0].double(), scores.amax(-1, keepdim=True).double())


@cache
def undisturbed() -> tuple[list[Tensor], tuple[Tensor, ...]]:
    given = parts((2, 1, 2, 40, 16))
    return given, passed(given)


MASKED_AND_ONLY = [((1, 0, 1, 3, 38), 40.0), ((1, 0, 1, 3, 38), math.nan), ((0, 0, 0, 0, 0), math.inf)]


def struck(place: tuple[int, ...], value: float) -> Change:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[place] = value
        return x

    return change


@pytest.mark.parametrize(
    ("place", "value"),
    [*(((1, 0, 1, 36, 5), value) for value in (40.0, -math.inf, math.nan)), *MASKED_AND_ONLY],
)
def test_scores_that_are_changed(place, value):
    """Seen ones and masked ones, and the only one of the first token; in no other head anything changes."""
    given, plain = undisturbed()
    found = passed(given, changing(struck(place, value)))
    for ours, theirs in zip(found, by_torch(given, struck(place, value)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)
    trial, _, head = place[:3]
    for number, (ours, before) in enumerate(zip(found, plain, strict=True)):
        heads = (ours.transpose(2, 3), before.transpose(2, 3)) if number == 0 else (ours, before)
        for one in range(2):
            for other in range(2):
                is_struck = (one, other) == (trial, head)
                assert torch.equal(*(x[one, 0, other] for x in heads)) or is_struck


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_head(value):
    given = parts((2, 1, 2, 40, 16))
    plain, (tap, told) = passed(given), looking()
    with torch.no_grad():
        given[0][1, 0, 0, 7, 3] = value
    found = passed(given, tap)
    assert torch.equal(found[0][0], plain[0][0]) and torch.equal(found[0][1, :, :, 1], plain[0][1, :, :, 1])
    assert found[0][1, 0, 7, 0].isnan().all() and found[0][1, 0, :7, 0].isfinite().all()
    for gradient, before in zip(found[1:], plain[1:], strict=True):
        assert torch.equal(gradient[0], before[0]) and torch.equal(gradient[1, :, 1], before[1, :, 1])
    scores = []
    passed(given, changing(lambda x: scores.append(x) or x))
    torch.testing.assert_close(told[0], scores[0].amax(-1, keepdim=True), rtol=0, atol=0, equal_nan=True)
    assert told[0][1, 0, 0, 7].isnan() == (scores[0][1, 0, 0, 7].isnan().any())


def test_bits_depend_neither_on_the_pack_nor_on_the_row():
    given = parts((3, 1, 2, 37, 8), torch.float32)
    together = passed(given)
    for rows in ([2], [2, 1]):
        some = [x.detach()[rows].clone().requires_grad_() for x in given[:3]]
        assert same(passed([*some, given[3][rows].contiguous()]), tuple(x[rows] for x in together))


# --- a whole pack ----------------------------------------------------------------------------------------------------

LONGER: dict[str, Any] = {"context": 20, "batch": 1, "steps": 2}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes of attention, by name."""
    names: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        plain = getattr(programs, name)

        def noted(*given: Any) -> Any:
            names.append(name)
            return plain(*given)

        return noted

    for name in ("attended", "mixed_by"):
        monkeypatch.setattr(programs, name, noting(name))
    return names


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pack_whose_scores_are_read(called, checkpointing):
    """Its trials have the bits of those whose scores are not, of which only the largest are asked for."""
    fields = LONGER | {"checkpointing": checkpointing}
    alone = engine.run(engine.different(2, signals={"attention_entropy": 0}, **fields))
    assert set(called) == {"attended"}
    called.clear()
    read = engine.run(engine.different(2, signals={"attention_entropy": 2}, **fields))
    assert set(called) == {"attended", "mixed_by"}
    assert torch.equal(alone.pack.weights, read.pack.weights)
    for name in ("loss", "grad_norm", "attention_logit_max", "validation_loss"):
        np.testing.assert_array_equal(alone.signals[name], read.signals[name], err_msg=name)
        assert np.isfinite(alone.signals[name]).any()


def test_a_trial_whose_scores_are_struck(called):
    """Beside it nothing changes, and it is its twin up to then."""
    fault = Value(start=1, site="activation", tensor="blocks.0.attention.scores", element=21, model="set", value=9.0)
    fields = LONGER | {"signals": {"attention_entropy": 0}}
    twin, struck = engine.trial(**fields), engine.trial(fault=fault, **fields)
    alone = engine.run([twin, twin])
    assert "mixed_by" not in called
    together = engine.run([twin, struck])
    assert called.count("mixed_by") == 1
    assert engine.same_bits(alone[0], together[0]) == []
    loss = together.signals["loss"]
    assert loss[0, 0] == loss[1, 0] and (loss[0, 1:] != loss[1, 1:]).all()


def test_a_pack_learns_as_by_torchs_operations(called, monkeypatch):
    trials = engine.different(2, precision="fp64", **LONGER)
    ours = engine.run(trials)
    assert called
    called.clear()
    monkeypatch.setattr(use, "is_installed", lambda: False)
    theirs = engine.run(trials)
    assert not called
    torch.testing.assert_close(ours.pack.weights, theirs.pack.weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fields", [{"attention_cap": 5.0}, {"soft_clip_high": 1.1}, {"dropout": 0.1}])
def test_what_has_no_program(called, fields):
    """Its scores or shares are worked on."""
    engine.run(engine.different(2, **LONGER | fields))
    assert not called
