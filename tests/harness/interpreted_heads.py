"""Heads that are split, turned and joined by Triton, in its interpreter on a CPU, against torch's own operations.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1: Triton looks at it when it is imported.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.kernels import heads as kernels
from harness.model import attention
from harness.model.attention import rotate, rotate_both, split_and_rotate, split_heads
from harness.testing import engine
from tests.harness.interpreted_kernels import HAS_FMA, numbers, on_a_cpu
from tests.harness.interpreting import alone, interpreted  # noqa: F401


@pytest.fixture(autouse=True)
def of_this_file_alone(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    alone(monkeypatch, "harness.model.attention")


BASE = 10000.0
TYPES = [  # of what is turned, and of what it is computed in
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
SHAPES = [  # R, B, T, H, D
    (1, 1, 1, 1, 2),
    (3, 2, 7, 3, 8),
    (9, 1, 5, 1, 4),
    (2, 1, 64, 2, 16),
    (1, 2, 65, 5, 24),
    (2, 1, 65, 3, 64),
    (1, 1, 33, 3, 128),
    (1, 1, 2, 1, 2048),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts are turned, at each launch."""
    found, launch = [], kernels.launch

    def noted(name: str, *arguments: Any, **constants: Any) -> None:
        found.append(constants["TURNED"])
        launch(name, *arguments, **constants)

    monkeypatch.setattr(kernels, "launch", noted)
    return found


def joined(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    trials, batch, context, heads, head_dim = shape
    return numbers(trials, batch * context, 3 * heads * head_dim, seed=seed, dtype=dtype)


def three(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    trials, batch, context, heads, head_dim = shape
    return [numbers(trials, batch, heads, context, head_dim, seed=seed, dtype=dtype) for seed in range(3)]


def angles_of(shape: tuple[int, ...], state: torch.dtype) -> Tensor:
    return attention._angles(shape[2], shape[4], BASE, state, torch.device("cpu"))


def turned(x: Tensor, angles: Tensor, back: bool = False) -> Tensor:
    """By real operations of torch, each of which rounds."""
    wide = x.to(angles.dtype)
    a, b, cos, sin = wide[..., 0::2], wide[..., 1::2], angles[..., 0], -angles[..., 1] if back else angles[..., 1]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def same(found: Any, expected: Any) -> bool:
    """Bit for bit."""
    return all(
        one.is_contiguous()
        and one.dtype == other.dtype
        and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "state", "shape"),
    [(*types, shape) for number, types in enumerate(TYPES) for shape in (SHAPES if not number else SHAPES[number::3])],
)
def test_heads_have_the_bits_of_products_that_are_rounded(dtype, state, shape):
    qkv, angles = joined(shape, dtype), angles_of(shape, state)
    parts = on_a_cpu(lambda: split_heads(qkv, shape[2], shape[3]))
    assert same(split_heads(qkv, shape[2], shape[3]), parts)
    q, k, v = parts
    expected = [turned(q, angles), turned(k, angles), v]
    assert same(split_and_rotate(qkv, shape[2], shape[3], BASE, state), expected)
    assert same(rotate_both(q, k, BASE, state), expected[:2])
    assert same(kernels.turn([q], angles, back=True), [turned(q, angles, back=True)])

    q, k, v = three(shape, dtype)
    back = [turned(q, angles, back=True), turned(k, angles, back=True), v]
    for given, parts in (((), (q, k, v)), ((angles,), back)):
        expected = torch.stack([part.transpose(2, 3) for part in parts], 3).view(qkv.shape)
        assert same([kernels.join([q, k, v], *given)], [expected])


@pytest.mark.parametrize(
    ("dtype", "state", "shape"), [(*types, shape) for number, types in enumerate(TYPES) for shape in SHAPES[number::4]]
)
def test_heads_and_their_gradients_are_those_of_complex_numbers(dtype, state, shape):
    """As a CPU has them, which rounds products and sums as one at the end of what it cuts into vectors."""

    def run() -> list[Tensor]:
        qkv = joined(shape, dtype).requires_grad_()
        parts = split_and_rotate(qkv, shape[2], shape[3], BASE, state)
        torch.autograd.backward(parts, three(shape, dtype))
        assert qkv.grad is not None
        return [*(part.detach() for part in parts), qkv.grad]

    found, expected = run(), on_a_cpu(run)
    if HAS_FMA and shape[2] * shape[4] % 32 == 0:  # whole vectors
        assert same(found, expected)
    tolerance = 4 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_heads_of_an_odd_size_are_split():
    qkv = joined((2, 1, 3, 3, 5), torch.float32).requires_grad_()
    parts = split_heads(qkv, 3, 3)
    assert same(parts, on_a_cpu(lambda: split_heads(qkv, 3, 3)))
    torch.autograd.backward(parts, [part.detach() for part in parts])
    assert same([qkv.grad], [qkv.detach()])


@pytest.mark.parametrize(("dtype", "state"), TYPES)
def test_turned_at_once_or_later(dtype, state):
    """The same bits, in the backward pass too: so whoever looks at heads in between changes nothing."""
    shape = (2, 2, 17, 3, 8)

    def run(is_fused: bool) -> list[Tensor]:
        qkv = joined(shape, dtype).requires_grad_()
        if is_fused:
            parts = split_and_rotate(qkv, shape[2], shape[3], BASE, state)
        else:
            q, k, v = split_heads(qkv, shape[2], shape[3])
            parts = (*rotate_both(q, k, BASE, state), v)
        torch.autograd.backward(parts, three(shape, dtype))
        assert qkv.grad is not None
        return [*parts, qkv.grad]

    assert same(run(True), run(False))


def test_how_gradients_lie_does_not_matter(launched):
    """As [T, H, D], where kernels of attention leave them so; or otherwise, each its own way."""
    shape = (2, 2, 6, 3, 8)
    parts, angles = three(shape, torch.float32), angles_of(shape, torch.float32)
    tokens_first = [part.transpose(2, 3).contiguous().transpose(2, 3) for part in parts]
    expected = kernels.join(parts, angles)
    assert not tokens_first[0].is_contiguous()
    assert same([kernels.join(tokens_first, angles)], [expected])
    assert same([kernels.join([tokens_first[0], *parts[1:]], angles)], [expected])
    same_for_all = [part[:1, :1].expand_as(part) for part in parts]
    assert same([kernels.join(same_for_all, angles)], [kernels.join([x.contiguous() for x in same_for_all], angles)])
    assert launched == [2] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_the_pack_nor_on_the_row(dtype):
    shape = (5, 2, 9, 3, 8)
    qkv, parts, angles = joined(shape, dtype), three(shape, dtype), angles_of(shape, torch.float32)

    def run(places: list[int]) -> list[Tensor]:
        split = kernels.split(qkv[places], shape[2], shape[3], angles)
        return [*split, kernels.join([part[places] for part in parts], angles), *kernels.turn(list(split[:2]), angles)]

    together = run(list(range(5)))
    for places in ([3], [4, 1, 2], [0] * 17):
        assert same(run(places), [each[places] for each in together])


@pytest.mark.parametrize("ruin", [math.nan, math.inf])
@pytest.mark.parametrize(("dtype", "state"), TYPES)
def test_what_is_not_finite_stays_in_its_pair(dtype, state, ruin):
    shape = (3, 2, 9, 3, 8)
    angles, clean = angles_of(shape, state), joined(shape, dtype)
    ruined = clean.clone()
    ruined[1, 4, 3] = ruin  # the query's second pair, in the first head of the fifth token
    sound, found = (kernels.split(qkv, shape[2], shape[3], angles) for qkv in (clean, ruined))
    pair = torch.zeros_like(sound[0], dtype=torch.bool)
    pair[1, 0, 0, 4, 2:4] = True
    assert not found[0][pair].isfinite().any()
    assert same([found[0].masked_fill(pair, 0.0), *found[1:]], [sound[0].masked_fill(pair, 0.0), *sound[1:]])
    back = kernels.join(found, angles)
    place = torch.zeros_like(back, dtype=torch.bool)
    place[1, 4, 2:4] = True
    assert not back[place].isfinite().any() and back[~place].isfinite().all()


# --- a whole pack ----------------------------------------------------------------------------------------------------


def pack(run: dict[str, Any], **options: Any) -> engine.Run:
    fields = {"steps": 2, "depth": 1, "context": 9, "head_dim": 8, "attention": "fused"}  # the heads alone
    return engine.run(engine.different(2, **fields, **run), **options)


def watch(taps: str) -> Any:
    """Readers that only read."""
    return lambda pack: pack.model.taps.attach(taps, lambda name, x: None)


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}, {"positions": "learned"}], ids=["plain", "norms", "learned"])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_a_pack_learns_with_them_as_without(monkeypatch, launched, precision, fields):
    ours = pack({"precision": precision, **fields})
    assert set(launched) == ({2} if not fields else {0} if "positions" in fields else {0, 2})
    launched.clear()
    monkeypatch.setattr(attention, "are_used", lambda device: False)
    theirs = pack({"precision": precision, **fields})
    assert not launched
    tolerance = {"fp32": 2e-5, "fp64": 1e-12, "bf16": 2e-2}[precision]
    for name in ("loss", "grad_norm", "param_norm"):
        np.testing.assert_allclose(ours.signals[name], theirs.signals[name], rtol=tolerance, err_msg=name)
    torch.testing.assert_close(ours.pack.weights, theirs.pack.weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whoever_reads_heads_changes_no_bit(launched, precision):
    """Even one of them, and where blocks are passed through twice."""
    plain = pack({"precision": precision})
    assert set(launched) == {2}
    for taps in ("*", "blocks.0.attention.key", "*.value"):
        launched.clear()
        engine.assert_same_trials(pack({"precision": precision}, prepare=watch(taps)), plain)
        assert set(launched) == ({2} if taps == "*.value" else {0, 2})
    engine.assert_same_trials(pack({"precision": precision, "checkpointing": True}), plain)


def test_one_array_at_a_time_is_turned_by_torch():
    """`rotate`, which stays the reference."""
    q, k, _ = three((2, 1, 8, 3, 8), torch.float64)
    expected = [rotate(part, BASE, torch.float64) for part in (q, k)]
    for one, other in zip(rotate_both(q, k, BASE, torch.float64), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-15, atol=1e-15)
