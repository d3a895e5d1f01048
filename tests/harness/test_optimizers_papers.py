"""Optimizers against others' code, and against their papers' equations written out in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import Trial
from harness.model.tensors import ScaledTensor
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.optimizers.muon import orthogonalised
from tests.harness.optimizing import STEPS, TENSORS, Rig, different, drawn, share, without
from tests.harness.optimizing import trial as one_trial

TOLERANCE = 1e-9  # float64 rounds at 1e-16; what divides gradients by their own size amplifies that
MATRICES = ("embedding", "square", "tall", "head")

Groups = list[dict[str, Any]]


def taken(trial: Trial, scaled: ScaledTensor, rate: float) -> float:
    """The share of a tensor's weights that decay takes, where it follows the rate."""
    return trial.optim.weight_decay * scaled.decay * rate * scaled.learning_rate


def rates(trial: Trial) -> list[float]:
    return [trial.optim.lr * share(step) for step in range(STEPS)]


def starts(trial: Trial) -> dict[str, Tensor]:
    """The weights before the first step, as `Rig` has them."""
    found = {scaled.name: drawn(scaled, trial.seed, -1) for scaled in TENSORS}
    return {**found, "head": torch.zeros_like(found["head"])}


def assert_equals(
    trials: Sequence[Trial], expected: Callable[[Trial], Mapping[str, Tensor]], tolerance: float = TOLERANCE
) -> None:
    """Trains all trials as one pack, and compares the weights of each."""
    rig = Rig(trials)
    rig.train(STEPS)
    for r, trial in enumerate(trials):
        for name, values in expected(trial).items():
            found, start = rig.view(name, r), starts(trial)[name]
            torch.testing.assert_close(found, values, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
            assert (found - start).abs().max() > 1e-3 * trial.optim.lr, f"{name} hardly moved, which says little"


# --- others' code, which takes two seconds to import -----------------------------------------------------------------


def trained_by(make: Callable[[Groups, Trial], torch.optim.Optimizer], only: Sequence[str] = ()) -> Any:
    """-> a function of a trial: its weights after `STEPS` steps of another's optimizer, decay taken off beside them.

    `make` gets a group for each tensor, with its own epsilon.
    """

    def train(trial: Trial) -> dict[str, Tensor]:
        rows = [scaled for scaled in TENSORS if not only or scaled.name in only]
        weights = {scaled.name: torch.nn.Parameter(starts(trial)[scaled.name]) for scaled in rows}
        groups: Groups = [
            {"params": [weights[scaled.name]], "eps": trial.optim.eps * scaled.epsilon} for scaled in rows
        ]
        optimizer = make(groups, trial)
        for step, rate in enumerate(rates(trial)):
            before = {name: weight.detach().clone() for name, weight in weights.items()}
            for group, scaled in zip(optimizer.param_groups, rows, strict=True):
                group["lr"], weights[scaled.name].grad = rate * scaled.learning_rate, drawn(scaled, trial.seed, step)
            optimizer.step()
            with torch.no_grad():
                for scaled in rows:
                    weights[scaled.name].sub_(before[scaled.name] * taken(trial, scaled, rate))
        return {name: weight.detach() for name, weight in weights.items()}

    return train


def betas(trial: Trial) -> tuple[float, float]:
    return trial.optim.beta1, trial.optim.beta2


def without_eps(groups: Groups) -> Groups:
    return [{"params": group["params"]} for group in groups]


def adam(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, betas=betas(trial))


def test_adamw() -> None:
    assert_equals(different("adamw"), trained_by(adam))


def test_adamw_whose_updates_could_be_clipped() -> None:
    """The equations one by one, where it is not the fused kernel."""
    assert_equals(different("adamw", clip_update=1e9), trained_by(adam))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov: bool) -> None:
    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        return torch.optim.SGD(without_eps(groups), lr=1.0, momentum=trial.optim.beta1, nesterov=nesterov)

    assert_equals(different("sgd", options=[{"nesterov": nesterov}], lr=0.01), trained_by(make))


def test_sgd_without_momentum() -> None:
    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        return torch.optim.SGD(without_eps(groups), lr=1.0)

    assert_equals(different("sgd", beta1=0.0), trained_by(make))


def test_lion() -> None:
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        return pytorch_optimizer.Lion(without_eps(groups), betas=betas(trial), weight_decay=0.0)

    assert_equals(different("lion"), trained_by(make))


def test_stable_adamw() -> None:
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        return pytorch_optimizer.StableAdamW(groups, betas=betas(trial), weight_decay=0.0)

    assert_equals(different("stable_adamw"), trained_by(make))


def test_ademamix() -> None:
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        own = trial.section("ademamix")
        kinds = {"alpha": own.alpha, "t_alpha_beta3": own.warmup, "weight_decay": 0.0}
        return pytorch_optimizer.AdEMAMix(groups, betas=(*betas(trial), own.beta3), **kinds)

    given = [{"warmup": 2 * STEPS}, {"alpha": 2.0, "beta3": 0.99, "warmup": STEPS}, {"beta3": 0.999, "warmup": 70}]
    assert_equals(different("ademamix", options=given), trained_by(make))


def test_the_slow_momentum_warms_up_over_the_run_if_nothing_else_is_said() -> None:
    whole = Rig([one_trial("ademamix"), one_trial("ademamix", options={"warmup": one_trial("ademamix").steps})])
    whole.train(3)
    assert all(torch.equal(whole.view(name, 0), whole.view(name, 1)) for name in MATRICES)


def test_cautious_adamw() -> None:
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        kinds = {"alpha": 0.0, "weight_decay": 0.0, "cautious": True}  # without its slow momentum it is AdamW
        return pytorch_optimizer.AdEMAMix(groups, betas=(*betas(trial), 0.999), **kinds)

    assert_equals(different("cautious_adamw"), trained_by(make))


@pytest.mark.parametrize("gamma", [0.025, 0.5])
def test_mars(gamma: float) -> None:
    """Of matrices; vectors are Adam's. Their code adds 1e-15 to the second moment."""
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        kinds = {"gamma": gamma, "betas": betas(trial), "weight_decay": 0.0, "lr": 1.0, "lr_1d": 1.0}
        return pytorch_optimizer.MARS(without_eps(groups), eps=1e-30, **kinds)

    trials = different("mars", options=[{"gamma": gamma}], eps=1e-30)
    assert_equals(trials, trained_by(make, only=MATRICES), tolerance=1e-6)
    assert_equals(trials, trained_by(adam, only=("gain", "scale")))


def test_muon() -> None:
    """Of matrices inside of blocks, with their Newton-Schulz in float64; all others are Adam's."""
    from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

    def equations(trial: Trial) -> dict[str, Tensor]:
        found, momentum = {}, trial.section("muon").momentum
        for scaled in (each for each in TENSORS if each.name in ("square", "tall")):
            weights, moment = starts(trial)[scaled.name].clone(), torch.zeros(scaled.shape, dtype=torch.float64)
            for step, rate in enumerate(rates(trial)):
                gradient = drawn(scaled, trial.seed, step)
                moment = momentum * moment + gradient
                way = zero_power_via_newton_schulz_5(gradient + momentum * moment, dtype=torch.float64)
                size = 0.2 * math.sqrt(max(scaled.shape))
                weights = weights * (1 - taken(trial, scaled, rate)) - rate * scaled.learning_rate * size * way
            found[scaled.name] = weights
        return found

    trials = different("muon", options=[{}, {"momentum": 0.8}])
    assert_equals(trials, equations)
    assert_equals(trials, trained_by(adam, only=("embedding", "head", "gain", "scale")))


def test_muon_is_that_of_torch_in_bf16() -> None:
    """Which rounds every product; of the first step in either direction."""
    tall = next(scaled for scaled in TENSORS if scaled.name == "tall")
    weight = torch.nn.Parameter(torch.zeros(tall.shape))
    weight.grad = drawn(tall, 0, 0).float()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    found = orthogonalised(drawn(tall, 0, 0)[None])[0] * 0.2 * max(tall.shape) ** 0.5
    torch.testing.assert_close(-found.float(), weight.detach(), rtol=0.05, atol=0.05)
    sizes = torch.linalg.svdvals(orthogonalised(drawn(tall, 0, 0)[None])[0])
    assert float(sizes.min()) > 0.5 and float(sizes.max()) < 1.3


def test_a_clipped_gradient_takes_muon_the_same_way() -> None:
    """Clipping acts on the gradient, whose size the first step of a matrix does not have; Adam's has it in epsilon."""
    found = []
    for factor in (1.0, 1e-3):
        rig = Rig([one_trial("muon"), one_trial("muon", seed=1)])
        rig.draw(0)
        rig.gradients.mul_(factor)
        rig.step()
        found.append(rig.view("square", 0).clone())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


OF_OTHERS = ("ademamix", "cautious_adamw", "mars", "muon")  # which have that code or its equations above
STABLE_SPAM = [{"interval": 20}, {"gamma1": 0.85, "gamma2": 0.99, "interval": 13}, {"gamma3": 0.9, "interval": 1000}]


def test_stable_spam() -> None:
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        own = trial.section("stable_spam")
        decays = {"gamma1": own.gamma1, "gamma2": own.gamma2, "theta": own.gamma3}
        return pytorch_optimizer.StableSPAM(groups, betas=betas(trial), update_proj_gap=own.interval, **decays)

    assert_equals(different("stable_spam", options=STABLE_SPAM), trained_by(make))


SPAM = [
    {"threshold": 2.0, "interval": 20, "warmup": 0, "grace": 4},
    {"threshold": 50.0, "interval": 13, "warmup": 0, "grace": 2},
    {"interval": 500, "warmup": 0, "grace": 20},
]


def test_spam_without_warmup() -> None:
    """The package counts the steps of a warm-up in another way than the authors, and corrects before epsilon."""

    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        own = trial.section("spam")
        gap = {"warmup_epoch": own.warmup, "update_proj_gap": own.interval, "grad_accu_steps": own.grace}
        return pytorch_optimizer.SPAM(groups, betas=betas(trial), threshold=own.threshold, eps=1e-30, **gap)

    assert_equals(different("spam", options=SPAM, eps=1e-30), trained_by(make))


def test_lamb_on_matrices() -> None:
    """Without epsilon: then it cancels in the ratio that the package does not correct the moments.

    It also holds |W| to 10, and scales vectors; unless told otherwise, it divides the rate by 1 - beta1^t.
    """

    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        found = pytorch_optimizer.Lamb(groups, betas=betas(trial), adam_debias=True)
        found.clamp = math.inf
        for group in found.param_groups:
            group["eps"] = 1e-30
        return found

    trained = trained_by(make, only=("embedding", "square", "tall"))
    assert_equals(different("lamb", eps=1e-30), trained)


def test_lars() -> None:
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        trust = trial.section("lars").trust
        return pytorch_optimizer.LARS(without_eps(groups), momentum=trial.optim.beta1, trust_coefficient=trust)

    trials = different("lars", options=[{"trust": 0.01}, {}, {"trust": 0.3}], lr=0.1)
    assert_equals(trials, trained_by(make, only=[scaled.name for scaled in TENSORS if scaled.name != "gains"]))


def test_adafactor() -> None:
    """With relative steps and scaled by the weights, as torch always has it."""

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        own = trial.section("adafactor")
        eps = (1e-30, own.smallest_scale)
        found = torch.optim.Adafactor(
            without_eps(groups), beta2_decay=-own.decay_exponent, d=own.clip, eps=eps, weight_decay=0.0
        )
        return found

    relative = {"relative_step": True, "parameter_scale": True}
    options = [relative, {**relative, "clip": 1.3, "decay_exponent": 0.5}, {**relative, "smallest_scale": 0.1}]
    # Torch compares 1/sqrt(t) with the rate after it has been multiplied, and factors the gains of several heads.
    names = [scaled.name for scaled in TENSORS if scaled.name != "gains" and scaled.learning_rate == 1]
    assert_equals(different("adafactor", options=options, lr=0.3), trained_by(make, only=names))


# --- the papers' equations ---------------------------------------------------------------------------------------

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
