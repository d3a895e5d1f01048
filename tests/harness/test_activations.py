"""Activations: each trial against torch's own functions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from harness.model.layers import ACTIVATIONS, clamp_swiglu

THEIRS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu, "swiglu": F.silu}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(name):
    x = torch.linspace(-6, 6, 90, dtype=torch.float64).view(3, 5, 6).requires_grad_()
    y = ACTIVATIONS[name].function(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    expected = THEIRS[name](x)
    (their_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-12, atol=1e-12)


def test_swiglu_alone_has_a_gate():
    assert [name for name, activation in ACTIVATIONS.items() if activation.gated] == ["swiglu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clamp_is_that_of_torch_at_each_trial_s_bound(dtype):
    """In bits, forward and backward, with many values right on the bounds."""
    whole = torch.randn(4, 40, 34, generator=torch.Generator().manual_seed(0), dtype=dtype).mul(2).round()
    bound = torch.tensor([1.0, 2.0, 0.3, 1e30], dtype=dtype).view(4, 1, 1)
    dy = torch.randn(4, 40, 17, generator=torch.Generator().manual_seed(1), dtype=dtype)
    found = []
    for clamp in (clamp_swiglu, lambda g, u, c: (torch.clamp(g, max=c), torch.clamp(u, min=-c, max=c))):
        x = whole.clone().requires_grad_()
        gate, up = clamp(*x.chunk(2, -1), bound)
        (gradient,) = torch.autograd.grad((gate * dy).sum() + (up * 2 * dy).sum(), x)
        found.append((gate, up, gradient))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    gate, up, gradient = found[0]
    assert (gate[0] == 1).any() and (gate[0] < -1).any() and up[0].abs().max() == 1
    assert (gradient[0, :, :17][whole[0, :, :17] == 1] != 0).all() and (gradient == 0).any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_clamp_of_what_is_not_finite(value):
    """Infinity is held, and NaN stays NaN, so that nothing is hidden; other trials see neither."""
    x = torch.ones(2, 3, 4)
    x[1] = value
    gate, up = clamp_swiglu(x, x, torch.tensor([5.0, 5.0]).view(2, 1, 1))
    assert torch.equal(gate[0], x[0]) and torch.equal(up[0], x[0])
    if value != value:
        assert gate[1].isnan().all() and up[1].isnan().all()
    else:
        assert (gate[1] == min(value, 5.0)).all() and (up[1] == max(-5.0, min(value, 5.0))).all()
