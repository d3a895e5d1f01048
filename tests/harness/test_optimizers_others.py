"""Optimizers against others' code, which takes two seconds to import."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import Trial
from harness.optim.optimizers.muon import orthogonalised
from tests.harness.optimizing import (
    MATRICES,
    STABLE_SPAM,
    STEPS,
    TENSORS,
    TOLERANCE,
    Rig,
    assert_equals,
    betas,
    different,
    drawn,
    rates,
    share,
    starts,
    taken,
)
from tests.harness.optimizing import trial as one_trial

Groups = list[dict[str, Any]]


def trained_by(
    make: Callable[[Groups, Trial], torch.optim.Optimizer], only: Sequence[str] = (), decays_itself: bool = False
) -> Any:
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
                for scaled in rows if not decays_itself else ():
                    weights[scaled.name].sub_(before[scaled.name] * taken(trial, scaled, rate))
        return {name: weight.detach() for name, weight in weights.items()}

    return train


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


def schedule_free(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
    import pytorch_optimizer

    for group, scaled in zip(groups, TENSORS, strict=True):
        group["weight_decay"] = trial.optim.weight_decay * scaled.decay
    return pytorch_optimizer.ScheduleFreeAdamW(groups, betas=betas(trial))


@pytest.fixture
def without_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their code adds 1e-15 to the second moment."""
    from pytorch_optimizer.base.optimizer import BaseOptimizer

    for function in (BaseOptimizer.apply_ams_bound, BaseOptimizer.apply_ams_bound_foreach):
        monkeypatch.setattr(function, "__defaults__", (0.0,))


@pytest.mark.usefixtures("without_a_floor")
def test_schedule_free() -> None:
    """The weights that train; their code takes decay off at the same point."""
    assert_equals(different("schedule_free"), trained_by(schedule_free, decays_itself=True))


@pytest.mark.usefixtures("without_a_floor")
def test_the_mean_by_which_schedule_free_is_judged() -> None:
    """Their `eval()`, where all rows have stepped, some have, and none has."""
    rig = Rig(different("schedule_free"))
    assert torch.equal(rig.optimizer.judged(), rig.weights)
    for steps, active in ((STEPS, None), (3, [True, False, True])):
        rig.train(steps, 0 if active is None else STEPS, active)
    training = rig.weights.clone()
    with rig.optimizer.judging():
        judged = rig.weights.clone()
    assert torch.equal(rig.weights, training)

    def evaluated(trial: Trial) -> dict[str, Tensor]:
        weights = {scaled.name: torch.nn.Parameter(starts(trial)[scaled.name]) for scaled in TENSORS}
        groups: Groups = [{"params": [weights[s.name]], "eps": trial.optim.eps * s.epsilon} for s in TENSORS]
        theirs = schedule_free(groups, trial)
        for step in range(STEPS + 3 * (trial.seed != 1)):
            for group, scaled in zip(theirs.param_groups, TENSORS, strict=True):
                group["lr"] = trial.optim.lr * share(step) * scaled.learning_rate
                weights[scaled.name].grad = drawn(scaled, trial.seed, step)
            theirs.step()
        theirs.eval()
        return {name: weight.detach() for name, weight in weights.items()}

    for row, trial in enumerate(rig.trials):
        for name, weight in evaluated(trial).items():
            ours = rig.layout.view(judged, name)[row]
            torch.testing.assert_close(ours, weight, rtol=TOLERANCE, atol=TOLERANCE)


def test_adamc() -> None:
    """Matrices but the head are `normalized`; there decay goes by the square of a rate, so multipliers do.

    Their code adds 1e-15 to the second moment, and epsilon before it corrects that.
    """
    import pytorch_optimizer

    def make(groups: Groups, trial: Trial) -> torch.optim.Optimizer:
        rows = [scaled for scaled in TENSORS if scaled.name in MATRICES]
        for group, scaled in zip(groups, rows, strict=True):
            is_normed = scaled.name != "head"
            decay = trial.optim.weight_decay * scaled.decay / (scaled.learning_rate if is_normed else 1.0)
            group |= {"normalized": is_normed, "weight_decay": decay}
        return pytorch_optimizer.AdamC(groups, lr=trial.optim.lr, betas=betas(trial))

    trials = different("adamc", eps=1e-30)
    assert_equals(trials, trained_by(make, only=MATRICES, decays_itself=True), tolerance=1e-6)
    assert_equals(trials, trained_by(adam, only=("gain", "scale")))


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
