"""Simulated data-parallel ranks: their mean is the gradient of the whole batch, added in the order asked for."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.testing import engine
from harness.training.config_checks import check_trial
from harness.training.ranks import Communicator
from tests.number_formats import NUMPY

RANKS = [1, 2, 4, 8]
ORDERS = ["sequential", "reversed", "pairwise"]
FORMATS = ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]


def learned(ranks, order="sequential", step=0, **fields):
    """Gradients [R, P] and losses [R] of one step, and the gradient of each rank alone, [ranks, R, P]."""
    trials = engine.different(3, batch=8, ranks=ranks, reduction=order, **fields)
    pack = engine.pack_of(trials)
    parts, losses = {}, []
    for rank, part in pack.ranks.parts(pack.objective.batch(step)):
        losses.append(pack.learn(part))
        parts[rank] = pack.gradients.clone()
        pack.ranks.add(pack.gradients)
    pack.ranks.finish(pack.gradients)
    return pack.gradients.clone(), torch.stack(losses).mean(0), torch.stack([parts[rank] for rank in sorted(parts)])


@cache
def whole_batch(precision):
    """The same of the batch in one piece."""
    return learned(1, precision=precision)


@cache
def trained(**fields):
    return engine.run(engine.different(3, **fields))


# --- the mean ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-12), ("fp32", 1e-5)])
def test_the_mean_over_ranks_is_the_gradient_of_the_batch(ranks, order, precision, bound):
    """Each trial's own batch. Sums of 64 tokens in another order differ by some 64 roundings of the largest term:
    7e-15 in float64, 4e-6 in float32, relative to the largest gradient."""
    whole, loss, _ = whole_batch(precision)
    mean, mean_loss, parts = learned(ranks, order, precision=precision)
    assert (mean - whole).abs().max() <= bound * whole.abs().max()
    torch.testing.assert_close(mean_loss, loss, rtol=bound, atol=0)
    assert parts.std(0).max() > 1e-3, "ranks differ, so a mean of some of them would not do"
    assert (whole[0] - whole[1]).abs().max() > 1e-3, "and so do trials"


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_training_with_ranks_is_training(ranks):
    """In float64, where the order of sums shows only at 1e-12 after 8 steps of Adam."""
    one, many = (trained(batch=8, ranks=n, precision="fp64") for n in (1, ranks))
    for name in ("loss", "grad_norm", "param_norm", "update_rms", "validation_loss"):
        np.testing.assert_allclose(many.signals[name], one.signals[name], rtol=1e-9)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("format", FORMATS)
def test_one_rank_is_no_rank_at_all(order, format):
    """Whatever the order and the format of a sum that has one term."""
    plain = trained(batch=4)
    ranked = engine.run(engine.different(3, batch=4, ranks=1, reduction=order, accumulation=format))
    assert [engine.same_bits(plain[i], ranked[i]) for i in range(3)] == [[], [], []]


def test_each_rank_has_its_own_sequences():
    """In the order of the batch, none twice, none left out."""
    pack = engine.pack_of(engine.different(2, batch=8, ranks=4))
    batch = pack.objective.batch(3)
    parts = dict(pack.ranks.parts(batch))
    assert sorted(parts) == [0, 1, 2, 3] and torch.equal(torch.cat([parts[i] for i in range(4)], dim=1), batch)
    assert {part.shape for part in parts.values()} == {(2, 2, 9)}


def test_ranks_are_those_of_a_trial_whatever_its_pack():
    trials = engine.different(7, batch=8, ranks=4, reduction="pairwise", accumulation="bf16")
    together = engine.run(trials)
    for members in ([5, 3], [6, 2, 4]):
        apart = engine.run([trials[i] for i in members])
        assert [engine.same_bits(apart[row], together[i]) for row, i in enumerate(members)] == [[]] * len(members)


@pytest.mark.parametrize("scaled", [{}, {"loss_scaling": "static", "loss_scale": 1024.0}])
def test_each_rank_is_clipped_before_the_mean(scaled):
    """Against torch's own clipping of each rank's gradient; what is clipped afterwards is the mean of those."""
    fields = {"batch": 8, "ranks": 4, "precision": "fp64", "name": "sgd", "beta1": 0.0, "weight_decay": 0.0, "lr": 1.0}
    fields |= {"warmup": 0, "decay": "constant", "steps": 1, "clip": (None, None, 0.01)}
    fields |= {"rank_clip": tuple({"limit": limit} for limit in (0.05, 1e9, 0.05))}
    trials = engine.different(3, **fields, **scaled)
    _, _, parts = learned(4, **{key: value for key, value in fields.items() if key not in ("batch", "ranks")})
    expected = torch.zeros_like(parts[0])
    for rank in range(4):
        for row, trial in enumerate(trials):
            one = torch.nn.Parameter(torch.zeros_like(parts[rank, row]))
            one.grad = parts[rank, row].clone()
            torch.nn.utils.clip_grad_norm_([one], trial.section("rank_clip").limit)
            expected[row] += one.grad / 4
    run = engine.run(trials)
    norms = expected.norm(dim=1)
    np.testing.assert_allclose(run.signals["grad_norm"][:, 0], norms, rtol=1e-9)
    expected[2] *= 0.01 / (norms[2] + 1e-6)
    before = engine.pack_of(trials).weights
    moved = torch.stack([before[row] - run.weights[-1][row] for row in range(3)])
    torch.testing.assert_close(moved, expected, rtol=1e-7, atol=1e-10)
    counts = [acts.get("rank_clip.limit", 0) for acts in run.result.acts]
    assert counts == [1, 0, 1]
    assert (parts[:, 0].norm(dim=1) > 0.05).all() and (parts[0, 0].norm() - parts[1, 0].norm()).abs() > 1e-3


# --- order and format of the sum ---------------------------------------------------------------------------------


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = x.astype(NUMPY[name]).astype(x.dtype)
    return np.where(np.abs(x) > 464, np.copysign(np.inf, x), found) if name == "fp8_e4m3" else found


def summed(parts: list[np.ndarray], order: str, name: str) -> np.ndarray:
    """Each sum of two is taken in float32 and rounded to the format; `pairwise` adds halves, recursively."""
    if order == "pairwise":
        if len(parts) == 1:
            return parts[0]
        half = 2 ** math.ceil(math.log2(len(parts)) - 1)
        left, right = summed(parts[:half], order, name), summed(parts[half:], order, name)
        return rounded(left + right, name)
    total, *others = parts[::-1] if order == "reversed" else parts
    for part in others:
        total = rounded(total + part, name)
    return total


def reduced(parts: np.ndarray, order: str, name: str) -> np.ndarray:
    """As the loop does it: rank after rank, in the order that the mean asks for."""
    mean = Communicator(len(parts), order, name)
    gradients = torch.empty(parts.shape[1:])
    for rank in mean.sequence():
        gradients.copy_(torch.from_numpy(parts[rank]))
        mean.add(gradients)
    mean.finish(gradients)
    return gradients.numpy()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_running_sum_is_rounded(ranks, order, format):
    """Bit for bit what a loop in numpy gives: magnitudes over four decades, so that small terms are lost."""
    draw = np.random.default_rng(ranks)
    parts = (draw.standard_normal((ranks, 2, 500)) * 10 ** draw.uniform(-3, 1, (ranks, 2, 500))).astype(np.float32)
    expected = summed(list(parts), order, format) / np.float32(ranks)
    assert reduced(parts, order, format).tobytes() == expected.tobytes()
    assert format == "fp32" or (reduced(parts, order, "fp32") != expected).mean() > 0.5


@pytest.mark.parametrize("order", ORDERS)
def test_orders_differ_in_the_last_bits_alone(order):
    parts = np.random.default_rng(0).standard_normal((8, 1, 5000)).astype(np.float32)
    found, exact = reduced(parts, order, "fp32"), parts.astype(np.float64).mean(0)
    assert np.abs(found - exact).max() < 8 * 2**-24 * np.abs(parts).sum(0).max() / 8  # seven roundings of a sum
    others = [reduced(parts, other, "fp32") for other in ORDERS if other != order]
    assert all((found != other).mean() > 0.1 for other in others)


def test_a_sum_in_fp16_overflows():
    parts = np.full((4, 1, 3), 30_000, dtype=np.float32)
    assert np.isinf(reduced(parts, "sequential", "fp16")).all()
    assert (reduced(parts, "sequential", "fp32") == 30_000).all()


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("order", ORDERS)
def test_the_loop_adds_as_configured(order, format):
    """The step's gradient, from the gradients of its ranks alone."""
    mean, _, parts = learned(4, order, accumulation=format)
    expected = summed(list(parts.numpy()), order, format) / np.float32(4)
    assert mean.numpy().tobytes() == expected.tobytes()


def test_what_is_not_finite_in_one_rank_is_so_in_the_mean():
    for order in ORDERS:
        parts = np.ones((4, 2, 3), dtype=np.float32)
        parts[2, 0, 1] = np.nan
        parts[1, 1, 2] = np.inf
        found = reduced(parts, order, "bf16")
        assert np.isnan(found[0, 1]) and np.isinf(found[1, 2]) and (np.isfinite(found)).sum() == 4


def test_ranks_have_to_divide_the_batch():
    with pytest.raises(ConfigError, match=r"^train.ranks=3: does not divide train.batch=8; allowed: a divisor of it$"):
        check_trial(engine.trial(batch=8, ranks=3))
