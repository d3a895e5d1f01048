"""The programs of sums and of cross-entropy in Triton's interpreter, on a CPU, against torch's own operations.

Run by test_kernels.py in a process of its own, with TRITON_INTERPRET=1: Triton looks at it when it is imported.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from harness.kernels import operators, use
from harness.model import sums
from harness.objectives.loss import cross_entropy
from harness.testing import engine
from harness.testing.engine import bits
from tests.harness.interpreting import interpreted  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter's own maximum
SIZES = [1, 2, 31, 100]
LONGEST = [(True, torch.bfloat16, 1025), (True, torch.float32, 2500), (False, torch.float64, 2500)]  # several tiles


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use, "is_installed", lambda: False)


@pytest.mark.parametrize(
    ("has_programs", "dtype", "size"),
    [*product([True, False], [torch.float32, torch.float64, torch.bfloat16], SIZES), *LONGEST],
)
def test_sums_are_right_and_go_by_the_row_alone(monkeypatch, has_programs, dtype, size):
    """Over the last dim and over one in the middle; the same bits of a row by itself and among others."""
    if not has_programs:
        without_programs(monkeypatch)
    x = normal(3, size, 3, dtype=dtype)
    tolerance = {"rtol": 2e-2 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-2 if dtype == torch.bfloat16 else 1e-4}
    for dim, of in ((1, lambda x: sums.total(x, 1)), (-1, lambda x: sums.total(x.mT.contiguous()))):
        found, expected = of(x), x.double().sum(1)
        torch.testing.assert_close(found.double(), expected, **tolerance)
        assert found.dtype == dtype
        for row in range(3):
            assert torch.equal(bits(of(x[row : row + 1].clone())[0]), bits(found[row])), dim
    torch.testing.assert_close(sums.mean(x, 1).double(), x.double().mean(1), **tolerance)


@pytest.mark.parametrize("has_programs", [True, False])
def test_powers_norms_and_spreads(monkeypatch, has_programs):
    if not has_programs:
        without_programs(monkeypatch)
    x = normal(3, 1300, dtype=torch.float64)
    for power in (1, 2, 3, 4):
        torch.testing.assert_close(sums.powers(x, power), (x**power).sum(1), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(sums.norm(x), x.norm(dim=1), rtol=1e-13, atol=0)
    torch.testing.assert_close(sums.std(x), x.std(1), rtol=1e-12, atol=0)
    x[1, 7], x[2, 9] = math.nan, math.inf
    torch.testing.assert_close(sums.nan_total(x), x.nansum(1), rtol=1e-12, atol=1e-10)
    assert sums.norm(x).isnan().tolist() == [False, True, False] and sums.norm(x)[2] == math.inf
    parts = [normal(3, 4, seed=seed) for seed in range(5)]
    torch.testing.assert_close(sums.mean_of(parts), torch.stack(parts).mean(0))
    whole = sums.root_of_squares([part.norm(dim=1) for part in parts])
    torch.testing.assert_close(whole, torch.cat(parts, 1).double().norm(dim=1))


def test_more_rows_than_a_grid_has_on_its_other_axes(monkeypatch):
    """A GPU has room for 65,535 there: rows are on the first one."""
    asked = []
    monkeypatch.setattr(operators, "launch", lambda name, grid, *arguments, **constants: asked.append((name, grid)))
    sums.powers(torch.zeros(70_000, 3))
    sums.total(torch.zeros(70_000, 300, 2), 1)
    assert asked == [("powers", (70_000,)), ("add_columns", (140_000, 1)), ("add_columns", (70_000, 1))]


# --- cross-entropy ---------------------------------------------------------------------------------------------------


def learned(logits, targets, z_loss, weights):
    """The losses, and the gradient of the logits."""
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf * 1.0, targets, z_loss, weights)
    loss.backward(torch.tensor([1.0, 65536.0, -2.0], dtype=logits.dtype))
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("vocabulary", [7, 16, 100, 2048, 2051, 5000])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_and_its_gradient_are_those_of_torch(monkeypatch, vocabulary, weighted, dtype):
    """With a z-loss that is 0 for the first trial; tokens of weight 0 show nothing, not even NaN."""
    logits = 5 * normal(3, 6, vocabulary, dtype=dtype)
    targets = torch.randint(vocabulary, (3, 6), generator=torch.Generator().manual_seed(1))
    targets[0, 0], targets[0, 1] = 0, vocabulary - 1
    z_loss = torch.tensor([0.0, 1e-4, 0.3], dtype=dtype)
    weights = normal(3, 6, seed=2, dtype=dtype).relu() if weighted else None
    if weights is not None:
        logits[0][weights[0] == 0] = math.nan
    found = learned(logits, targets, z_loss, weights)
    without_programs(monkeypatch)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
    for ours, theirs, scale in zip(found, learned(logits, targets, z_loss, weights), (1.0, 65536.0), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance["rtol"], atol=scale * tolerance["atol"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_is_not_finite_shows_as_in_torch(monkeypatch, value, everywhere):
    logits, targets = normal(3, 6, 40), torch.full((3, 6), 5)
    logits[1, 2, slice(None) if everywhere else 17] = value
    found = learned(logits, targets, None, None)
    without_programs(monkeypatch)
    for ours, theirs in zip(found, learned(logits, targets, None, None), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
        torch.testing.assert_close(ours[[0, 2]], theirs[[0, 2]], rtol=1e-5, atol=1e-6)


def test_the_gradient_is_where_the_logits_were():
    leaf = normal(3, 6, 40).requires_grad_()
    logits = leaf * 1.0
    arrived = []
    logits.register_hook(arrived.append)
    cross_entropy(logits, torch.zeros(3, 6, dtype=torch.int64)).sum().backward()
    assert arrived[0].data_ptr() == logits.data_ptr()


def test_a_pack_learns_with_them_as_without(monkeypatch):
    trials = engine.different(2, precision="fp64", steps=2, z_loss=(0.0, 1e-3))
    ours = engine.run(trials)
    without_programs(monkeypatch)
    theirs = engine.run(trials)
    for name in ("loss", "grad_norm", "param_norm", "activation_rms", "validation_loss", "validation_loss_error"):
        np.testing.assert_allclose(ours.signals[name], theirs.signals[name], rtol=1e-12, err_msg=name)
    torch.testing.assert_close(ours.pack.weights, theirs.pack.weights, rtol=1e-12, atol=1e-12)
