"""Gradient norms, and scaling by them, at the ends of float32's range and between tensors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from harness.model.parameters import Layout
from harness.model.scaling import tensor_table
from harness.optim.clipping import (
    CPU_COLUMNS,
    clipping_factor,
    global_norm,
    scale_tensors,
    scale_trials,
    tensor_norms,
)
from harness.testing import engine

ONE_TENSOR = SimpleNamespace(padding=torch.tensor([], dtype=torch.int64))


def exactly(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def layout():
    """Of sizes that leave gaps between the tensors."""
    model = engine.trial(width=6, head_dim=6, feedforward=7, activation="swiglu").model
    found = Layout(tuple(tensor_table(model, 61)))
    assert len(found.padding) > 20
    return found


def gradients_of(layout, rows, seed=0):
    """Random ones, zero between the tensors."""
    found = torch.randn(rows, layout.size, generator=torch.Generator().manual_seed(seed))
    return found.index_fill_(1, layout.padding, 0.0)


def test_norm_and_clipping_of_extreme_gradients():
    gradients = torch.tensor(
        [[3e38] * 100, [1e-30] * 100, [0.0] * 100, [math.inf] + [0.0] * 99, [3.0, 4.0] + [0.0] * 98]
    )
    norm = global_norm(gradients)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm[[0, 1, 2, 4]], exactly(3e39, 1e-29, 0.0, 5.0), rtol=1e-6, atol=0)
    assert norm[3] == math.inf
    clipped = gradients.clone()
    scale_trials(clipped, clipping_factor(norm, exactly(1.0, 1.0, 1.0, 1.0, 2.5)), ONE_TENSOR)
    torch.testing.assert_close(clipped[0], torch.full((100,), 0.1))
    assert torch.equal(clipped[1:3], gradients[1:3])
    assert clipped[3, 0].isnan() and not clipped[3, 1:].any()
    torch.testing.assert_close(clipped[4, :2], torch.tensor([1.5, 2.0]))


@pytest.mark.parametrize(("value", "expected"), [(1e25, 1e25), (math.inf, math.inf), (1e-30, 1e-30)])
def test_a_trial_whose_norm_is_taken_again_changes_no_other(value, expected):
    """Over several pieces of a CPU's sum; the large value stands in the last but one."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3, 3 * CPU_COLUMNS + 5, generator=generator)
    alone = global_norm(gradients)
    gradients[1] = 0
    gradients[1, 2 * CPU_COLUMNS + 7] = value
    norm = global_norm(gradients)
    assert torch.equal(norm[[0, 2]], alone[[0, 2]])
    assert norm[1].item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(norm[[0, 2]], gradients[[0, 2]].double().norm(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-30])
def test_a_norm_does_not_depend_on_how_many_are_taken(scale, threads):
    """Neither of those in range nor of those that are taken again; one of them larger than a piece."""
    torch.set_num_threads(threads)
    model = engine.trial(width=96, head_dim=32, depth=1, vocabulary=1000).model
    layout = Layout(tuple(tensor_table(model, 1000)))
    gradients = gradients_of(layout, 7) * scale
    together, tensors = global_norm(gradients), tensor_norms(gradients, layout)
    for rows in ([5, 3], [6, 2, 4], [1, 0, 5, 6, 4]):
        assert torch.equal(global_norm(gradients[rows]), together[rows])
        assert torch.equal(tensor_norms(gradients[rows], layout), tensors[rows])


def test_each_tensor_has_its_own_norm(layout):
    """Whose squares may overflow, or vanish, while those of the others do not."""
    gradients, names = gradients_of(layout, 4), [scaled.name for scaled in layout.tensors]
    sizes = {"head": 1e25, "embedding": 1e-30, "blocks.0.feedforward.up": 0.0, "blocks.1.attention.key": math.inf}
    for name, size in sizes.items():
        layout.view(gradients, name)[1].mul_(size)
    layout.view(gradients, "final_norm")[3, 2] = math.nan
    found = tensor_norms(gradients, layout)
    assert found.dtype == torch.float64 and found.shape == (4, len(names))
    for number, name in enumerate(names):
        expected = layout.view(gradients, name).double().flatten(1).norm(dim=1)
        torch.testing.assert_close(found[:, number], expected, rtol=1e-6, atol=0, equal_nan=True)
    assert found[3].isnan().nonzero().tolist() == [[names.index("final_norm")]]
    assert found[1].isinf().nonzero().tolist() == [[names.index("blocks.1.attention.key")]]


@pytest.mark.parametrize("factor", [0.5, 0.0, math.nan, 1.0])
def test_what_stands_between_tensors_stays_zero(layout, factor):
    gradients, padding = gradients_of(layout, 3), layout.padding
    rows, tensors = gradients.clone(), gradients.clone()
    scale_trials(rows, exactly(1.0, factor, 0.25), layout)
    factors = exactly(1.0, factor, 0.25)[:, None].expand(3, len(layout.tensors))
    scale_tensors(tensors, factors, layout)
    for scaled in (rows, tensors):
        assert not scaled[:, padding].any() and torch.equal(scaled[0], gradients[0])
        torch.testing.assert_close(scaled[2], gradients[2] * 0.25, rtol=0, atol=0)
        for each in layout.tensors:
            expected = layout.view(gradients, each.name)[1] * factor
            torch.testing.assert_close(layout.view(scaled, each.name)[1], expected, rtol=0, atol=0, equal_nan=True)


def test_padding_is_what_no_tensor_has(layout):
    gradients = torch.zeros(1, layout.size).index_fill_(1, layout.padding, 1.0)
    assert not any(layout.view(gradients, scaled.name).any() for scaled in layout.tensors)
    assert len(layout.padding) + layout.elements == layout.size


@pytest.mark.parametrize("norm", [0.0, 0.3, 7.0, math.inf, math.nan])
def test_the_factor_is_that_of_torch(norm):
    """And without a limit nothing is touched, whatever the norm."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = exactly(norm)
    torch.nn.utils.clip_grad_norm_([weight], 0.5)
    with_limit, without = clipping_factor(exactly(norm, norm), exactly(0.5, math.inf)).tolist()
    assert norm * with_limit == pytest.approx(weight.grad.item(), rel=1e-15, nan_ok=True)
    assert without == 1
