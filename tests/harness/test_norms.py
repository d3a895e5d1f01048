"""Norms, gains and single numbers: each trial against torch's own functions, and what defines them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from harness.model.layers import NORMS, Leaf, layer_norm, rms_norm, scaled, shifted

EPSILON = 1e-3


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(ours, theirs, x, weight):
    """Values and gradients of `ours(x, leaf)` on all trials and `theirs(x[r], weight[r])` on each."""
    our_x, leaf = x.clone().requires_grad_(), Leaf(weight, torch.full_like(weight, math.nan))
    y = ours(our_x, leaf)
    dy = normal(*y.shape, seed=9)
    y.backward(dy)
    for r in range(len(x)):
        their_x, their_weight = x[r].clone().requires_grad_(), weight[r].clone().requires_grad_()
        expected = theirs(their_x, their_weight)
        expected.backward(dy[r])
        torch.testing.assert_close(y[r].detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(our_x.grad[r], their_x.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(leaf.gradient[r], their_weight.grad, rtol=1e-11, atol=1e-12)


THEIRS = {
    "layer": lambda x, gain: F.layer_norm(x, [x.shape[-1]], None, None, EPSILON) * gain,
    "rms": lambda x, gain: F.rms_norm(x, [x.shape[-1]], None, EPSILON) * gain,
}


@pytest.mark.parametrize("norm", THEIRS)
@pytest.mark.parametrize("shape", [(8,), (8, 2), (2, 4, 6)])
def test_a_norm_with_one_row_of_gains(norm, shape):
    x, gains = 1.5 + 2 * normal(3, *shape, 5), normal(3, 5, seed=1)
    compare(lambda x, leaf: NORMS[norm](x, leaf, EPSILON), THEIRS[norm], x, gains)


@pytest.mark.parametrize("norm", THEIRS)
def test_a_norm_with_a_row_of_gains_for_each_head(norm):
    """[B, H, T, D] with [H, D]."""
    x, gains = 1.5 + 2 * normal(3, 2, 4, 6, 5), normal(3, 4, 5, seed=1)
    compare(lambda x, leaf: NORMS[norm](x, leaf, EPSILON), lambda x, g: THEIRS[norm](x, g[:, None]), x, gains)


@pytest.mark.parametrize("norm", THEIRS)
def test_a_norm_with_a_row_of_gains_for_each_of_three_parts(norm):
    """[N, 3, D] with [3, D]."""
    x, gains = 1.5 + 2 * normal(3, 8, 3, 5), normal(3, 3, 5, seed=1)
    compare(lambda x, leaf: NORMS[norm](x, leaf, EPSILON), THEIRS[norm], x, gains)


def test_what_the_two_norms_leave():
    """LayerNorm takes the mean off, RMSNorm does not; both leave a root mean square of one."""
    x = 3 + normal(2, 6, 50)
    leaf = Leaf(torch.ones(2, 50, dtype=torch.float64), torch.zeros(2, 50, dtype=torch.float64))
    layer, rms = layer_norm(x, leaf, 1e-12), rms_norm(x, leaf, 1e-12)
    for y in (layer, rms):
        torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 6, dtype=torch.float64))
    assert layer.mean(-1).abs().max() < 1e-12 and rms.mean(-1).min() > 0.8
    torch.testing.assert_close(rms_norm(7 * x, leaf, 1e-12), rms, rtol=1e-9, atol=0)
    torch.testing.assert_close(rms_norm(x - x.mean(-1, keepdim=True), leaf, 1e-12), layer, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", THEIRS)
def test_a_norm_of_zeros_is_zero_and_has_a_finite_gradient(norm):
    x = torch.zeros(2, 3, 5, requires_grad=True)
    y = NORMS[norm](x, Leaf(torch.ones(2, 5), torch.zeros(2, 5)), 1e-6)
    y.sum().backward()
    assert not y.any() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("features", [1, 5])
def test_factors(features):
    x, factors = normal(3, 8, 5), normal(3, features, seed=1)
    compare(scaled, lambda x, w: x * w, x, factors)


def test_summands():
    compare(shifted, lambda x, w: x + w, normal(3, 8, 5), normal(3, 1, seed=1))
