"""Sigma-reparametrisation: spectral norms of the matrices in use, and the vectors that are carried along."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.model.layers import Leaf
from harness.model.sigma import reparametrised
from harness.model.tensors import Kind
from harness.testing import engine
from harness.testing.settings import roughen
from tests.harness.variants import with_fields


def trials_of(count=3, **fields):
    trials = engine.different(count, activation="swiglu", **fields)
    return with_fields(trials, {"sigma_reparam": True})


def used(pack, first, last=None):
    """The matrices that linear layers read in the place of these, [R, k x out, in]."""
    model = pack.model
    gamma = model.tools().leaf(f"{first}_scale", f"{last}_scale" if last else None)
    vectors = model.tools().vectors.stack(first, last, slice(0, len(pack)))
    x = torch.zeros(len(pack), 1, 1)
    return reparametrised(x, model.tools().leaf(first, last), gamma, *vectors)[1].weight


def test_spectral_norms_are_one_at_the_start():
    pack = engine.pack_of(trials_of())
    pack.begin(0)
    for block in range(2):
        attention, feedforward = f"blocks.{block}.attention", f"blocks.{block}.feedforward"
        qkv = used(pack, f"{attention}.query", f"{attention}.value").chunk(3, 1)
        gate_up = used(pack, f"{feedforward}.gate", f"{feedforward}.up").chunk(2, 1)
        others = used(pack, f"{attention}.projection"), used(pack, f"{feedforward}.down")
        for matrices in (*qkv, *gate_up, *others):
            largest = torch.linalg.matrix_norm(matrices, ord=2)
            torch.testing.assert_close(largest, torch.ones(3), rtol=1e-5, atol=0)


def test_each_spectral_norm_is_its_gamma():
    pack = engine.pack_of(trials_of())
    for number, name in enumerate(("query", "key", "value")):
        pack.layout.view(pack.weights, f"blocks.1.attention.{name}_scale").fill_(0.5 + number)
    pack.begin(0)
    for number, matrices in enumerate(used(pack, "blocks.1.attention.query", "blocks.1.attention.value").chunk(3, 1)):
        largest = torch.linalg.matrix_norm(matrices, ord=2)
        torch.testing.assert_close(largest, torch.full((3,), 0.5 + number), rtol=1e-5, atol=0)


def test_one_power_iteration_a_step_follows_the_weights():
    """sigma(W) after 30 steps of training; it is at most the spectral norm, and close to it."""
    run = engine.run(trials_of(steps=30))
    pack = run.pack
    pack.begin(30)
    moved = False
    for scaled in pack.layout.tensors:
        if scaled.kind in (Kind.HIDDEN, Kind.RESIDUAL):
            exact = torch.linalg.matrix_norm(pack.layout.view(pack.weights, scaled.name), ord=2)
            largest = torch.linalg.matrix_norm(used(pack, scaled.name), ord=2)
            gamma = pack.layout.view(pack.weights, f"{scaled.name}_scale")[:, 0]
            ratio = largest / gamma.abs()  # exact norm over the one that was found
            assert (ratio > 1 - 1e-5).all() and (ratio < 1.1).all()
            moved |= bool(((exact - 1).abs() > 0.1).any())
    assert moved, "no matrix has a norm of its own, so this says little"


def test_the_size_of_a_matrix_does_not_matter():
    """And the gradient is at right angles to the matrix, as for any function of its direction alone."""
    trials = trials_of(precision="fp64")
    plain, larger = engine.pack_of(trials), engine.pack_of(trials)
    name = "blocks.0.feedforward.down"
    larger.layout.view(larger.weights, name).mul_(8.0)
    losses = []
    for pack in (plain, larger):
        pack.begin(0)
        losses.append(pack.learn(pack.objective.batch(0)))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    weight, gradient = (plain.layout.view(flat, name) for flat in (plain.weights, plain.gradients))
    along = (weight * gradient).sum((1, 2)) / weight.norm(dim=(1, 2)) / gradient.norm(dim=(1, 2))
    assert along.abs().max() < 1e-12
    torch.testing.assert_close(larger.layout.view(larger.gradients, name), gradient / 8, rtol=1e-9, atol=1e-12)


def test_a_struck_weight_is_seen_by_the_same_step():
    """The power iteration comes after faults of weights: a spike makes sigma large, and not the matrix in use."""
    pack = engine.pack_of(trials_of())
    name = "blocks.0.feedforward.down"
    pack.layout.view(pack.weights, name)[1, 3, 5] = 1e6
    pack.begin(0)
    assert used(pack, name)[1].abs().max() <= 1.001


def test_nothing_moves_in_a_frozen_trial_and_in_validation():
    pack = engine.pack_of(trials_of())
    roughen(pack)
    before = dict(pack.rows_state)["singular_vectors"].clone()
    pack.active = torch.tensor([True, False, True])
    pack.begin(0)
    after = dict(pack.rows_state)["singular_vectors"].clone()
    assert torch.equal(before[1], after[1]) and not (before[0] == after[0]).all() and not (before[2] == after[2]).all()
    pack.validation_losses(64)
    assert torch.equal(dict(pack.rows_state)["singular_vectors"], after)


def test_vectors_are_no_parameters():
    """They are neither counted, nor clipped, nor decayed: the state has them beside the weights."""
    plain, pack = (
        engine.pack_of(engine.different(2)),
        engine.pack_of(with_fields(engine.different(2), {"sigma_reparam": True})),
    )
    assert pack.layout.elements == plain.layout.elements + 2 * 6  # a gamma for each of six matrices


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_power_iteration(ranks):
    """The mean over ranks is the whole batch's gradient, to rounding."""
    fields = {"steps": 3, "batch": 4, "precision": "fp64"}
    alone, shared = (engine.run(trials_of(ranks=n, **fields)) for n in (1, ranks))
    np.testing.assert_allclose(shared.signals["loss"], alone.signals["loss"], rtol=1e-9)
    np.testing.assert_allclose(shared.signals["grad_norm"], alone.signals["grad_norm"], rtol=1e-8)


def test_a_layer_alone():
    """Against autograd through sigma, its vectors held constant."""
    generator = torch.Generator().manual_seed(0)
    x, weight, gamma, left, right, dy = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 7, 3), (2, 8, 3), (2, 2), (2, 2, 4), (2, 2, 3), (2, 7, 8))
    )
    leaf, gamma_leaf = Leaf(weight, torch.empty_like(weight)), Leaf(gamma, torch.empty_like(gamma))
    x.requires_grad_()
    passed, reparametrised_leaf = reparametrised(x, leaf, gamma_leaf, left, right)
    leaf.gradient.copy_(dy.mT @ x.detach())  # what a linear layer leaves there
    passed.backward(torch.ones_like(x))
    assert torch.equal(x.grad, torch.ones_like(x))
    for r in range(2):
        w, g = weight[r].clone().requires_grad_(), gamma[r].clone().requires_grad_()
        parts = [g[k] * m / (left[r, k] @ m @ right[r, k]) for k, m in enumerate(w.chunk(2))]
        expected = torch.cat(parts)
        torch.testing.assert_close(reparametrised_leaf.weight[r], expected.detach(), rtol=1e-12, atol=1e-12)
        (x[r].detach() @ expected.T).backward(dy[r])
        torch.testing.assert_close(leaf.gradient[r], w.grad, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(gamma_leaf.gradient[r], g.grad, rtol=1e-10, atol=1e-10)
