"""The loss, and what holds output logits back: z-loss and soft cap."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from harness.basics import devices
from harness.model.layers import soft_cap
from harness.objectives import loss as module
from harness.objectives.loss import cross_entropy
from harness.objectives.outcome import NON_FINITE
from harness.testing import engine
from injectors.value import Value
from tests.harness.features import LOSSES

Z = [0.0, 1e-4, 0.3]


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def targets():
    return torch.randint(0, 7, (3, 10), generator=torch.Generator().manual_seed(1))


# --- against the formulas, in float64 -------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_gradients_are_those_of_loss_and_z_loss_and_the_value_that_of_the_loss(size, weighted):
    logits = (size * normal(3, 10, 7) + 3).requires_grad_()
    weights = normal(3, 10, seed=2).abs() if weighted else None
    loss = cross_entropy(logits, targets(), torch.tensor(Z, dtype=torch.float64), weights)
    dloss = torch.tensor([1.0, 65536.0, -2.0], dtype=torch.float64)  # as loss scaling has it
    loss.backward(dloss)
    for r in range(3):
        own = logits[r].detach().requires_grad_()
        each_token = F.cross_entropy(own, targets()[r], reduction="none")
        z_loss = Z[r] * own.exp().sum(-1).log().square() if size == 1 else Z[r] * own.logsumexp(-1).square()
        share = torch.ones(10, dtype=torch.float64) if weights is None else weights[r]
        torch.testing.assert_close(loss[r].detach(), (share * each_token).mean().detach(), rtol=1e-14, atol=1e-14)
        (share * (each_token + z_loss)).mean().mul(dloss[r]).backward()
        torch.testing.assert_close(logits.grad[r], own.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 10])
def test_pieces_are_the_whole(monkeypatch, weighted, tokens):
    """As an accelerator takes them, so many tokens at a time; and the gradient is where the logits were."""
    z_loss, weights = torch.tensor(Z, dtype=torch.float64), normal(3, 10, seed=2).relu() if weighted else None
    gradients, losses, arrived = [], [], []
    for piece in (None, tokens):
        if piece:
            monkeypatch.setattr(devices, "CPUS", ())
            monkeypatch.setattr(module, "PIECE", piece * 3 * 7 * 8)
        leaf = (5 * normal(3, 10, 7)).requires_grad_()
        logits = leaf * 1.0
        logits.register_hook(lambda gradient, logits=logits: arrived.append((gradient, logits)))
        loss = cross_entropy(logits, targets(), z_loss, weights)
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    is_same = [gradient.data_ptr() == logits.data_ptr() for gradient, logits in arrived]
    assert is_same == [False, tokens < 10]
    torch.testing.assert_close(*losses, rtol=1e-15, atol=0)
    assert torch.equal(*gradients)


def test_a_z_loss_pulls_log_z_towards_zero():
    """Along its gradient alone: the common shift of all logits, which the loss itself does not feel."""
    for shift in (-5.0, 5.0):
        logits = (normal(3, 10, 7) + shift).requires_grad_()
        cross_entropy(logits, targets(), torch.ones(3, dtype=torch.float64)).sum().backward()
        log_z = logits.detach().logsumexp(-1)
        torch.testing.assert_close(logits.grad.sum(-1), 2 * log_z / 10)
        assert (log_z.sign() == math.copysign(1, shift)).all()


@pytest.mark.parametrize("bound", [0.5, 30.0])
def test_a_cap_and_its_gradient(bound):
    bounds = torch.tensor([bound, 1.0, 1e3], dtype=torch.float64).view(3, 1, 1)
    x = (10 * normal(3, 10, 7)).requires_grad_()
    y, dy = soft_cap(x, bounds), normal(3, 10, 7, seed=1)
    y.backward(dy)
    own = x.detach().requires_grad_()
    expected = bounds * torch.tanh(own / bounds)
    expected.backward(dy)
    torch.testing.assert_close(y.detach(), expected.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(x.grad, own.grad, rtol=1e-13, atol=1e-14)
    assert (y.abs() <= bounds).all()


def test_a_cap_holds_what_is_infinite_and_lets_nan_through():
    x = torch.tensor([[-math.inf, -1e30, 0.0, 1e30, math.inf, math.nan]], requires_grad=True)
    y = soft_cap(x, torch.tensor([[30.0]]))
    assert y[0, :5].tolist() == [-30, -30, 0, 30, 30] and y[0, 5].isnan()
    y[0, :5].sum().backward()
    assert x.grad[0, :5].tolist() == [0, 0, 1, 0, 0]


# --- in the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_z_loss_beside_one_changes_no_bit(precision):
    """A coefficient of zero in a pack where others have one."""
    plain = engine.run([engine.trial(seed=r, precision=precision) for r in range(3)])
    beside = engine.run([engine.trial(seed=r, precision=precision, z_loss=float(r == 1)) for r in range(3)])
    assert [engine.same_bits(plain[i], beside[i]) == [] for i in range(3)] == [True, False, True]
    assert plain.signals["loss"][1, 0] == beside.signals["loss"][1, 0], "the recorded loss is without the z-loss"
    assert plain.signals["grad_norm"][1, 0] != beside.signals["grad_norm"][1, 0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_without_a_z_loss_a_log_z_that_is_not_finite_does_not_show(value):
    """Not even where it is the target's logit that is not; other tokens have finite gradients, z-loss or not."""
    logits = normal(2, 10, 7, dtype=torch.float32)
    logits[torch.arange(2), 3, targets()[:2, 3]] = value
    found = []
    for z_loss in (None, torch.tensor([0.0, 1.0])):
        own = logits.clone().requires_grad_()
        cross_entropy(own, targets()[:2], z_loss).sum().backward()
        found.append(own.grad)
    assert torch.equal(found[0][0].nan_to_num(7), found[1][0].nan_to_num(7))
    others = [token for token in range(10) if token != 3]
    assert all(torch.isfinite(gradient[:, others]).all() for gradient in found)


@pytest.mark.parametrize("mup", [{}, {"parametrization": "mup", "base_width": 8}])
def test_logits_are_capped_after_the_multiplier(mup):
    seen = {}
    for cap in (None, 0.05):
        pack = engine.pack_of([engine.trial(seed=r, output_cap=cap, **mup) for r in range(2)])
        weights = pack.layout.view(pack.weights, "head")
        weights.copy_(normal(*weights.shape))  # under muP the head starts at zero
        pack.model.taps.attach("logits", lambda name, x, cap=cap: seen.update({cap: x.clone()}))
        pack.learn(pack.objective.batch(0))
    torch.testing.assert_close(seen[0.05], 0.05 * torch.tanh(seen[None] / 0.05))
    assert seen[0.05].abs().max() <= 0.05 < seen[None].abs().max()


def test_a_struck_logit_is_what_the_loss_reads():
    """The tap stands behind the cap, so that no cap holds the fault back; its gradient can be struck too."""
    trials = [engine.trial(seed=r, output_cap=2.0, z_loss=0.1) for r in range(3)]
    golden = engine.run(trials)
    for site, value in (("activation", 1e3), ("activation_gradient", 1.0)):
        fault = Value(start=3, site=site, model="set", value=value, tensor="logits", element=5)
        faulty = engine.run([trials[0], replace(trials[1], fault=fault), trials[2]])
        (event,) = faulty.result.events[1]
        assert float(event.after) == value and abs(float(event.before)) < 2
        assert [engine.same_bits(golden[i], faulty[i]) == [] for i in range(3)] == [True, False, True]
        moved = faulty.signals["loss"][1, 3] != golden.signals["loss"][1, 3]
        assert moved == (site == "activation")
        assert faulty.signals["grad_norm"][1, 3] != golden.signals["grad_norm"][1, 3]


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", LOSSES.values(), ids=LOSSES)
def test_it_trains(fields):
    """30 steps: the loss falls by a tenth of a nat even where the cap is 1, and each trial has its own strength."""
    trials = [engine.trial(lr=1e-2, **engine.in_turn(fields, r), steps=30, batch=8, context=16) for r in range(3)]
    run = engine.run(trials)
    losses = run.signals["loss"]
    assert NON_FINITE not in run.result.outcome and (losses[:, 0] - losses[:, -1] > 0.1).all()
    assert len(set(losses[:, 5].tolist())) == 3
    np.testing.assert_allclose(losses[:, -1], run.signals["validation_loss"][:, -1], atol=0.5)
