"""The programs of norms in Triton's interpreter, on a CPU, against torch's own operations.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1: Triton looks at it when it is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.kernels import norms, use
from harness.memory.footprint import LEARN, META, count, rehearsal
from harness.model.layers import NORMS, Leaf, norm_beside
from harness.testing import engine
from harness.testing.engine import bits
from harness.training.pack import Pack
from tests.harness.interpreted_kernels import numbers
from tests.harness.interpreting import alone, interpreted  # noqa: F401
from tests.harness.test_norms import EPSILON, THEIRS, compare, normal


@pytest.fixture(autouse=True)
def of_this_file_alone(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    alone(monkeypatch, "harness.model.layers")


HALF = (torch.bfloat16, torch.float16)


def by_torch(make: Callable[[], Any]) -> Any:
    """What `make` returns, by torch's own operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(use, "is_installed", lambda: False)
        return make()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names, launch = [], norms.launch

    def noted(name: str, *arguments: Any, **constants: Any) -> None:
        names.append(name)
        launch(name, *arguments, **constants)

    monkeypatch.setattr(norms, "launch", noted)
    return names


def in_flat(gains: Tensor, behind: int = 0) -> Leaf:
    """Gains and their gradients as a model has them: columns of flat arrays, between others'."""
    rows, features = gains.shape
    columns = 16 + -(-features // 16) * 16 + 16
    weights, gradients = (torch.full((rows + behind, columns), 7.0, dtype=gains.dtype) for _ in range(2))
    leaf = Leaf(*(flat[behind:, 16 : 16 + features] for flat in (weights, gradients)))
    leaf.weight.copy_(gains)
    return leaf


def passed(norm: str, x: Tensor, gains: Tensor, dy: Tensor, beside: Tensor | None = None) -> tuple[Tensor, ...]:
    """y, dx, and the gradient of the gain; with `beside`, that is the gradient of the other use of x."""
    x, leaf = x.detach().requires_grad_(), in_flat(gains)
    if beside is None:
        y = NORMS[norm](x, leaf, EPSILON)
        (dx,) = torch.autograd.grad(y, x, dy)
    else:
        near, y = norm_beside(norm, x, leaf, EPSILON)
        (dx,) = torch.autograd.grad([near, y], x, [beside, dy])
    flat = leaf.gradient._base
    assert flat is not None and (flat[:, :16] == 7).all() and (flat[:, 16 + x.shape[-1] :] == 7).all()
    return y.detach(), dx, leaf.gradient.clone()


def data(rows: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """x, gains, dy, and another gradient of x; dy and gains in float32 where x is half."""
    exact = torch.promote_types(dtype, torch.float32)
    x, other = ((1.5 + 2 * numbers(rows, *shape, seed=seed + i, dtype=torch.float64)).to(dtype) for i in range(2))
    return x, numbers(rows, shape[-1], seed=seed + 2, dtype=exact), numbers(*x.shape, seed=seed + 3, dtype=exact), other


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


kinds = pytest.mark.parametrize("norm", THEIRS)


# --- values --------------------------------------------------------------------------------------------------------


PASSED = [
    (3, (1, 7)),
    (17, (5, 16)),
    (1, (33, 48)),
    (2, (3, 2, 11, 64)),
    (2, (131, 100)),
    (1, (37, 1536)),
    (1, (3, 8192)),
]


@kinds
@pytest.mark.parametrize(
    ("dtype", "rows", "shape"),
    [*((torch.float32, *each) for each in PASSED), *((torch.float64, *each) for each in PASSED[:4:3])],
)
def test_a_norm_has_torchs_numbers(launched, norm, dtype, rows, shape):
    x, gains, dy, _ = data(rows, *shape, dtype=dtype)
    ours, theirs = passed(norm, x, gains, dy), by_torch(lambda: passed(norm, x, gains, dy))
    assert launched == ["normed", "normed_backward", "add_blocks"]
    for found, expected in zip(ours, theirs, strict=True):
        few = (1e-13 if dtype == torch.float64 else 1e-6) * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=10 * torch.finfo(dtype).eps, atol=few)


@kinds
@pytest.mark.parametrize(("shape", "features"), [((8,), 64), ((7, 3), 7), ((2, 4, 37), 48)])
def test_its_gradients_are_autograds(launched, norm, shape, features):
    """Of torch's own functions, trial by trial, in float64."""
    x, gains = 1.5 + 2 * normal(3, *shape, features), normal(3, features, seed=1)
    compare(lambda x, leaf: NORMS[norm](x, leaf, EPSILON), THEIRS[norm], x, gains)
    assert launched


@kinds
def test_one_feature(norm):
    """LayerNorm leaves nothing of it."""
    x, gains, dy, _ = data(3, 131, 1, dtype=torch.float64)
    y, dx, dgain = passed(norm, x, gains, dy)
    if norm == "layer":
        assert not y.any() and not dx.any() and not dgain.any()
    else:
        expected = x / (x * x + EPSILON).sqrt()
        torch.testing.assert_close(y, expected * gains[:, None], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(dgain, (dy * expected).sum(1), rtol=1e-12, atol=1e-12)


@kinds
@pytest.mark.parametrize("half", HALF)
def test_half_inputs_are_read_as_their_float32(norm, half):
    """What is computed of them too, and rounded where it is left: the gradient has their type."""
    x, gains, dy, _ = data(3, 29, 48, dtype=half)
    ours, exact = passed(norm, x, gains, dy), passed(norm, x.float(), gains, dy)
    assert ours[0].dtype == ours[2].dtype == torch.float32 and ours[1].dtype == half
    assert same(ours, (exact[0], exact[1].to(half), exact[2]))
    theirs = by_torch(lambda: passed(norm, x, gains, dy))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("half", HALF)
def test_half_gains(norm, half):
    """Everything is then left in their type, and computed in float32."""
    x, gains, dy = (each.to(half) for each in data(2, 29, 48, dtype=half)[:3])
    ours, exact = passed(norm, x, gains, dy), passed(norm, x, gains.float(), dy.float())
    assert all(found.dtype == half for found in ours)
    assert torch.equal(ours[0], exact[0].to(half)) and torch.equal(ours[1], exact[1])
    torch.testing.assert_close(ours[2], exact[2].to(half), rtol=torch.finfo(half).eps, atol=0)


@kinds
def test_large_numbers_with_little_between_them(norm):
    """The variance is that of what is left of the mean, and not a difference of two large numbers."""
    x = 1e4 + numbers(2, 5, 64)
    y, *_ = passed(norm, x, torch.ones(2, 64), torch.ones(2, 5, 64))
    exact = by_torch(lambda: passed(norm, x.double(), torch.ones(2, 64).double(), torch.ones(2, 5, 64).double()))[0]
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=3e-3)


# --- whose numbers they are ----------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize(("shape", "dtype"), [((67, 48), torch.float32), ((3, 2, 9, 7), torch.float64)])
def test_bits_depend_neither_on_the_pack_nor_on_the_row(norm, shape, dtype):
    x, gains, dy, beside = data(24, *shape, dtype=dtype)
    together = passed(norm, x, gains, dy, beside)
    for places in ([3], [23], [4, 0], list(range(5, 21))):
        few = passed(norm, x[places], gains[places], dy[places], beside[places])
        assert same(few, tuple(whole[places] for whole in together))
    part = slice(21, 24)
    assert same(passed(norm, x[part], gains[part], dy[part], beside[part]), tuple(whole[part] for whole in together))


@kinds
@pytest.mark.parametrize("ruin", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(norm, ruin):
    """Whichever array it stands in; and of x, in its token as well, until gains add up."""
    given = data(3, 67, 48)
    sound = passed(norm, *given)
    for number in range(len(given)):
        ruined = [x.clone() for x in given]
        ruined[number][1].view(-1)[48 * (number != 1) + 5] = ruin
        found = passed(norm, *ruined)
        assert not same(found, sound)
        assert same(tuple(x[[0, 2]] for x in found), tuple(x[[0, 2]] for x in sound))
        if number == 0:
            others = [0, *range(2, 67)]
            assert same(tuple(x[1, others] for x in found[:2]), tuple(x[1, others] for x in sound[:2]))
            assert found[0][1, 1].isnan().any()


@kinds
def test_how_arrays_lie_changes_no_bit(norm):
    """Not contiguous, or not at the start of a vector, in arrays and in gains."""
    x, gains, dy, beside = data(3, 8, 13, 5)
    usual = passed(norm, x, gains, dy, beside)
    odd = [torch.empty(each.numel() + 1, dtype=each.dtype)[1:].view(each.shape).copy_(each) for each in (x, dy, beside)]
    across = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (x, dy, beside)]
    assert all(each.data_ptr() % norms.VECTOR for each in odd) and not any(each.is_contiguous() for each in across)
    for laid in (odd, across):
        assert same(passed(norm, laid[0], gains, *laid[1:]), usual)
    leaf = Leaf(gains, torch.full_like(gains, math.nan))  # of 20 bytes a row
    x.requires_grad_()
    y = NORMS[norm](x, leaf, EPSILON)
    y.backward(dy)
    assert same((y.detach(), leaf.gradient), (usual[0], usual[2]))


def test_a_gain_for_each_head_is_torchs(launched):
    leaf = Leaf(numbers(3, 4, 5), torch.zeros(3, 4, 5))
    NORMS["layer"](numbers(3, 2, 4, 6, 5).requires_grad_(), leaf, EPSILON).sum().backward()
    assert not launched and leaf.gradient.any()


# --- beside another use --------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
@pytest.mark.parametrize("shape", [(13, 7), (67, 64)])
def test_gradients_of_two_uses_are_autograds_sum(norm, dtype, shape):
    x, gains, dy, beside = data(3, *shape, dtype=dtype)
    y, dx, dgain = passed(norm, x, gains, dy)
    assert same(passed(norm, x, gains, dy, beside), (y, dx + beside, dgain))
    assert not same((dx + beside,), (dx,))


def test_the_other_use_is_x_itself():
    x = numbers(2, 5, 7).requires_grad_()
    near, _ = norm_beside("layer", x, in_flat(torch.ones(2, 7)), EPSILON)
    assert near.data_ptr() == x.data_ptr() and torch.equal(near, x)


# --- a whole pack --------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "layer": {},
    "rms, gated": {"norm": "rms", "activation": "swiglu", "up_norm": True, "precision": "fp64"},
    "of queries and keys": {"qk_norm": True, "biases": True, "placement": "sandwich"},
    "half norms": {"precision": "bf16", "norms": "products", "qk_norm": True},
    "half": {"precision": "bf16", "placement": "post", "embedding_norm": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pack_learns_with_them_as_without(launched, shape):
    trials = engine.different(2, steps=2, **SHAPES[shape])
    ours = engine.run(trials)
    assert launched.count("normed_backward") == launched.count("add_blocks") > 0
    launched.clear()
    theirs = by_torch(lambda: engine.run(trials))
    assert not launched
    tolerance = {"fp64": 1e-11, "bf16": 2e-3}.get(trials[0].train.precision, 2e-5)
    for name in ("loss", "grad_norm", "param_norm"):
        np.testing.assert_allclose(ours.signals[name], theirs.signals[name], rtol=tolerance, err_msg=name)


@pytest.mark.parametrize("fields", [{}, {"norm": "rms", "placement": "deepnorm"}, {"placement": "mix"}])
def test_who_reads_changes_no_bit(launched, fields):
    """Readers of what norms read, through which no gradients are added in the norm; nor do checkpointed blocks."""
    fields = {"steps": 2, **fields}
    trials = engine.different(2, **fields)
    plain = engine.run(trials)
    calls, read = len(launched), []

    def attach(pack: Pack) -> None:
        pack.model.taps.attach("*.input", lambda name, x: read.append(name))

    tapped = engine.run(trials, prepare=attach)
    assert read and len(launched) == 2 * calls
    engine.assert_same_trials(tapped, plain)
    again = engine.different(2, checkpointing=True, **fields)
    engine.assert_same_trials(engine.run(again), plain)


def test_memory_is_planned_as_it_is_taken():
    small, trial = (
        rehearsal(engine.trial(qk_norm=True, **fields))
        for fields in ({"depth": 1}, {"depth": 2, "width": 32, "head_dim": 16, "context": 64, "batch": 8})
    )
    cpu = torch.device("cpu")
    count(small, 2, 2, cpu)  # what the host keeps for itself is there then
    found, expected = count(trial, 2, 2, META)[LEARN], count(trial, 2, 2, cpu)[LEARN]
    assert found == pytest.approx(expected, rel=0.03)
    assert found < 0.97 * by_torch(lambda: count(trial, 2, 2, META))[LEARN], "the normed x is not kept"
