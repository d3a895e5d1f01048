"""Optimizers against their papers' equations, written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import Trial
from harness.model.tensors import ScaledTensor
from harness.optim.optimizers import OPTIMIZERS
from tests.harness.optimizing import (
    MATRICES,
    STABLE_SPAM,
    TENSORS,
    Rig,
    assert_equals,
    betas,
    different,
    drawn,
    rates,
    starts,
    taken,
    without,
)

# Those that test_optimizers_others.py and test_optimizers_soap.py have.
OF_OTHERS = ("adamc", "ademamix", "cautious_adamw", "mars", "muon", "schedule_free", "soap")


Equations = Callable[[Trial, ScaledTensor, dict[str, Any], Tensor, Tensor, int, float], Tensor]
"""(trial, row, memory, weights, gradient, step from 1 on, rate) -> what the step takes off, without decay."""


def written_out(equations: Equations) -> Callable[[Trial], dict[str, Tensor]]:
    def train(trial: Trial) -> dict[str, Tensor]:
        weights = starts(trial)
        for scaled in TENSORS:
            memory: dict[str, Any] = {}
            for step, rate in enumerate(rates(trial)):
                w, gradient = weights[scaled.name], drawn(scaled, trial.seed, step)
                off = equations(trial, scaled, memory, w, gradient, step + 1, rate * scaled.learning_rate)
                weights[scaled.name] = w - w * taken(trial, scaled, rate) - off
        return weights

    return train


def adam_moments(trial: Trial, memory: dict[str, Any], gradient: Tensor) -> tuple[Tensor, Tensor]:
    beta1, beta2 = betas(trial)
    m = memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * gradient
    v = memory["v"] = beta2 * memory.get("v", 0.0) + (1 - beta2) * gradient**2
    return m, v


def rising_beta2(
    trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float
) -> Tensor:
    """AdamW with PaLM's beta2 of 1 - t^-c (arXiv 2204.02311, section 5), which needs no correction."""
    c = trial.optim.beta2_exponent
    m = memory["m"] = trial.optim.beta1 * memory.get("m", 0.0) + (1 - trial.optim.beta1) * gradient
    v = memory["v"] = (1 - t**-c) * memory.get("v", 0.0) + t**-c * gradient**2
    return rate * m / (1 - trial.optim.beta1**t) / (v.sqrt() + epsilon(trial, scaled))


def test_a_rising_beta2() -> None:
    trials = [without(one, beta2_exponent=c) for one, c in zip(different("adamw"), (0.8, 0.5, 1.3), strict=True)]
    assert_equals(trials, written_out(rising_beta2))


def epsilon(trial: Trial, scaled: ScaledTensor) -> float:
    return trial.optim.eps * scaled.epsilon


def lamb(trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float) -> Tensor:
    """Algorithm 2 of arXiv 1904.00962."""
    m, v = adam_moments(trial, memory, gradient)
    m_hat, v_hat = (x / (1 - beta**t) for x, beta in zip((m, v), betas(trial), strict=True))
    r = m_hat / (v_hat.sqrt() + epsilon(trial, scaled))
    ratio = float(w.norm() / r.norm()) if scaled.name in MATRICES and w.norm() > 0 else 1.0
    return rate * ratio * r


def lars(trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float) -> Tensor:
    """Algorithm 1 of arXiv 1708.03888, with the rate outside of the velocity."""
    ratio = 1.0
    if scaled.name in MATRICES and w.norm() > 0:
        ratio = float(trial.section("lars").trust * w.norm() / gradient.norm())
    memory["v"] = trial.optim.beta1 * memory.get("v", 0.0) + ratio * gradient
    return rate * memory["v"]


def stable_adamw(
    trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float
) -> Tensor:
    """Algorithm 2 of arXiv 2304.13013, whose v and u are the moments; section 3.4 for the epsilon in RMS."""
    beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in betas(trial))
    v = memory["v"] = beta1 * memory.get("v", 0.0) + (1 - beta1) * gradient
    u = memory["u"] = beta2 * memory.get("u", 0.0) + (1 - beta2) * gradient**2
    eps = epsilon(trial, scaled)
    rms = float((gradient**2 / u.clamp(min=eps**2)).mean().sqrt())
    return rate / max(1.0, rms) * v / (u.sqrt() + eps)


def spam(trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float) -> Tensor:
    """The authors' code at density 1, with epsilon after the correction."""
    own = trial.section("spam")
    if t % own.interval == 0:
        memory |= {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "since": 0, "count": 0}
    if t % own.interval >= own.grace and t >= own.grace:
        v = memory["v"]
        gradient = torch.where(gradient**2 > own.threshold * v, gradient.sign() * (own.threshold * v).sqrt(), gradient)
    since = memory.get("since", math.inf)
    death = 0.99 * (1 + math.cos(math.pi * since / (own.warmup + 1))) / 2 if since < own.warmup else 0.0
    memory["since"], memory["count"] = since + 1, memory.get("count", 0) + 1
    m, v = adam_moments(trial, memory, gradient)
    count = memory["count"] if own.reset_count else t
    m_hat, v_hat = (x / (1 - beta**count) for x, beta in zip((m, v), betas(trial), strict=True))
    return rate * (1 - death) * m_hat / (v_hat.sqrt() + epsilon(trial, scaled))


def stable_spam(
    trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float
) -> Tensor:
    """Algorithm 1 of arXiv 2502.17055."""
    own, eps = trial.section("stable_spam"), epsilon(trial, scaled)
    largest = gradient.abs().max()
    memory["T"] = own.gamma3 * memory.get("T", 0.0) + (1 - own.gamma3) * largest
    limit = memory["T"] / (1 - own.gamma3**t)
    gradient = torch.where(gradient.abs() > limit, gradient / largest * limit, gradient)
    size = gradient.norm()
    memory["mean"] = own.gamma1 * memory.get("mean", 0.0) + (1 - own.gamma1) * size
    memory["square"] = own.gamma2 * memory.get("square", 0.0) + (1 - own.gamma2) * size**2
    mean, square = memory["mean"] / (1 - own.gamma1**t), memory["square"] / (1 - own.gamma2**t)
    gradient = gradient / size * mean / (square.sqrt() + eps)
    if t % own.interval == 0:
        memory |= {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "count": 0}
    memory["count"] = memory.get("count", 0) + 1
    m, v = adam_moments(trial, memory, gradient)
    count = memory["count"] if own.reset_count else t
    m_hat, v_hat = (x / (1 - beta**count) for x, beta in zip((m, v), betas(trial), strict=True))
    return rate * m_hat / (v_hat.sqrt() + eps)


def adafactor(
    trial: Trial, scaled: ScaledTensor, memory: Any, w: Tensor, gradient: Tensor, t: int, rate: float
) -> Tensor:
    """Algorithms 4 and 5 of arXiv 1804.04235, with sums; the scheduled rate in the place of 0.01."""
    own = trial.section("adafactor")
    beta = 1 - t**-own.decay_exponent
    squares = gradient**2 + own.eps * scaled.epsilon**2
    if scaled.name in MATRICES:
        r = memory["R"] = beta * memory.get("R", 0.0) + (1 - beta) * squares.sum(1)
        c = memory["C"] = beta * memory.get("C", 0.0) + (1 - beta) * squares.sum(0)
        v = torch.outer(r, c) / r.sum()
    else:
        v = memory["V"] = beta * memory.get("V", 0.0) + (1 - beta) * squares
    update = gradient / v.sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()) / own.clip)
    if own.relative_step:
        rate = scaled.learning_rate * min(rate / scaled.learning_rate, 1 / math.sqrt(t))
    scale = max(own.smallest_scale, float(w.square().mean().sqrt())) if own.parameter_scale else 1.0
    return rate * scale * update


WARM = [
    {"warmup": 5, "interval": 16, "grace": 3, "threshold": 2.0},
    {"warmup": 30, "interval": 12, "grace": 20, "reset_count": True},
]
EQUATIONS: dict[str, tuple[Equations, list[dict[str, Any]]]] = {
    "lamb": (lamb, [{}]),
    "lars": (lars, [{"trust": 0.01}, {"trust": 0.3}]),
    "stable_adamw": (stable_adamw, [{}]),
    "spam": (spam, [{"warmup": 150, "interval": 500, "grace": 20}, *WARM]),
    "stable_spam": (stable_spam, [*STABLE_SPAM, {"interval": 7, "reset_count": False}]),
    "adafactor": (adafactor, [{}, {"clip": 0.5, "eps": 1e-3}, {"relative_step": True, "decay_exponent": 0.5}]),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations(name: str) -> None:
    equations, options = EQUATIONS[name]
    assert_equals(
        different(name, 4, options, lr=0.3 if name in ("lars", "adafactor") else 0.01), written_out(equations)
    )


def test_adafactor_relative_to_the_weights() -> None:
    options = [{"parameter_scale": True}, {"parameter_scale": True, "relative_step": True, "smallest_scale": 0.1}]
    assert_equals(different("adafactor", 4, options, lr=0.3), written_out(adafactor))


@pytest.mark.parametrize("name", EQUATIONS)
def test_float32_is_the_same_to_rounding(name: str) -> None:
    """What a pack trains in; epsilon is large enough that no element is divided by its own rounding."""
    trials = [without(trial, eps=1e-4) for trial in different(name, 3, EQUATIONS[name][1])]
    exact, rounded = Rig(trials), Rig(trials, dtype=torch.float32)
    for rig in (exact, rounded):
        rig.train(20)
    moved = (exact.weights - Rig(trials).weights).norm(dim=1)
    assert ((exact.weights - rounded.weights).norm(dim=1) < 1e-4 * moved + 1e-6).all()


def test_every_optimizer_has_an_independent_source() -> None:
    assert set(OPTIMIZERS) == {"adamw", "sgd", "lion", *OF_OTHERS, *EQUATIONS}, "write the equations of a new one above"
