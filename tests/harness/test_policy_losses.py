"""Losses of policy gradients against TRL's own code, formulas of papers written down again, and enumeration."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.policy.advantages import advantages, spread, zero_spread
from harness.policy.losses import (
    KINDS,
    Completions,
    LossKind,
    LossStrengths,
    correction_weights,
    mean_shares,
    penalties,
    surrogate,
)
from harness.policy.probabilities import token_scores

B, T, V, GROUP = 6, 5, 7, 3
LENGTHS = torch.tensor([5, 3, 1, 4, 5, 2])
MASK = (torch.arange(T) < LENGTHS[:, None])[None]
ADVANTAGES = torch.tensor([[1.3, -0.7, 0.4, -1.1, 0.0, 2.0]], dtype=torch.float64)


def drawn(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = torch.randint(0, V, (1, B * T), generator=torch.Generator().manual_seed(1))
LOGITS = drawn(2, 1, B * T, V)


def plain_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    logp = logits.log_softmax(-1)
    of_tokens = logp.gather(-1, TOKENS[..., None])[..., 0].view(1, B, T)
    return of_tokens, -(logp.exp() * logp).sum(-1).view(1, B, T)


def completions_of(logits: Tensor, mean: str, apart: float = 0.3) -> Completions:
    scores = token_scores(logits, TOKENS)
    logp = scores.log_probability.view(1, B, T)
    old, behaviour, reference = (logp.detach() + drawn(seed, 1, B, T, scale=apart) for seed in (3, 4, 5))
    share, token_share = (mean_shares(MASK, of, torch.float64) for of in (mean, "tokens"))
    entropy = scores.entropy.view(1, B, T)
    return Completions(logp, entropy, old, behaviour, reference, MASK, ADVANTAGES, share, token_share)


def number(value: float | None) -> Tensor | None:
    return None if value is None else torch.full((1, 1, 1), value, dtype=torch.float64)


def ours(kind: LossKind, mean: str, **strengths: float | None) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to the logits."""
    logits = LOGITS.clone().requires_grad_()
    given = {"clip_low": 0.2, "clip_high": 0.25, **strengths}
    loss = surrogate(
        kind, LossStrengths(**{name: number(x) for name, x in given.items()}), completions_of(logits, mean)
    ).loss[0]
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


# --- TRL's own code --------------------------------------------------------------------------------------------------


@cache
def method(file: str, cls: str, name: str) -> Callable[..., Tensor]:
    """One method of TRL, from its file alone: its package wants what downloads from hubs."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("needs TRL: make install") if not os.environ.get("CI") else pytest.fail("no TRL")
    tree = ast.parse((Path(found.origin).parent / "trainer" / file).read_text())
    (of_class,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    (function,) = (node for node in of_class.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    largest = {"nanmin": torch.min, "nanmax": torch.max}
    scope: dict[str, Any] = {"torch": torch, "math": math, **largest}
    exec(compile(ast.Module([function], []), file, "exec"), scope)
    made: Callable[..., Tensor] = scope[name]
    return made


def trl(kind: LossKind, loss_type: str, **settings: Any) -> tuple[Tensor, Tensor]:
    """What GRPOTrainer makes of the same numbers."""
    logits = LOGITS.clone().requires_grad_()
    of = completions_of(LOGITS, "tokens")
    logp, entropy = plain_scores(logits)
    given = {"beta": 0.0, "delta": None, "entropy": 0.0, "off_policy": None, "high": 0.25, **settings}
    alone = SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    alone.sync_gradients = True
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp[0], entropy[0], None),
        get_off_policy_mask=method("grpo_trainer.py", "GRPOTrainer", "get_off_policy_mask"),
        args=SimpleNamespace(
            use_bias_correction_kl=kind.is_penalty_weighted, delta=given["delta"], steps_per_generation=1
        ),
        **{"aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": given["off_policy"]},
        **{"importance_sampling_level": kind.level, "beta": given["beta"], "loss_type": loss_type},
        **{"epsilon_low": 0.2, "epsilon_high": given["high"], "model": SimpleNamespace(training=True)},
        **{"use_vllm": kind.correction != "none", "vllm_importance_sampling_correction": True},
        **{"current_gradient_accumulation_steps": 1, "max_completion_length": T, "accelerator": alone},
        **{"_entropy_bonus_enabled": bool(given["entropy"]), "use_adaptive_entropy": False},
        **{"entropy_coef": given["entropy"], "_metrics": {"train": defaultdict(list)}},
    )
    inputs = {"prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1)}
    inputs |= {"completion_ids": TOKENS.view(B, T), "completion_mask": MASK[0].double(), "advantages": ADVANTAGES[0]}
    inputs |= {"old_per_token_logps": of.old[0], "ref_per_token_logps": of.reference[0]}
    inputs |= {"sampling_per_token_logps": of.behaviour[0], "num_items_in_batch": LENGTHS.sum().double()}
    if kind.correction != "none":
        inputs["importance_sampling_ratio"] = plain_correction(kind.correction, of, 1.2)[0]
    loss = method("grpo_trainer.py", "GRPOTrainer", "_compute_loss")(trainer, None, inputs)
    loss.backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def plain_correction(kind: str, of: Completions, cap: float) -> Tensor:
    """As GRPOTrainer has it where it generates."""
    off = (of.old - of.behaviour) * of.mask
    ratio = torch.exp(off if kind.startswith("token") else off.sum(-1, keepdim=True))
    return ratio.clamp(max=cap) if kind.endswith("truncate") else ratio.masked_fill(ratio > cap, 0.0)


MEANS = {"grpo": "sequences", "bnpo": "tokens", "dapo": "tokens", "dr_grpo": "longest"}


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)
    assert expected[1].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", MEANS)
def test_loss_and_gradient_are_those_of_trl(loss_type: str, level: str) -> None:
    for weighted in (True, False):
        kind = LossKind(level=level, penalty="k3", is_penalty_weighted=weighted)
        found = ours(kind, MEANS[loss_type], beta=0.4, entropy=0.03)
        assert_equal(found, trl(kind, loss_type, beta=0.4, entropy=0.03))
    kind = LossKind(level=level)
    assert_equal(ours(kind, MEANS[loss_type]), trl(kind, loss_type))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo_dual_clip_and_the_mask_of_old_sequences_are_those_of_trl(level: str) -> None:
    """TRL's CISPO cuts off at `epsilon_high` itself, and ours, as the paper does, at 1 plus that."""
    cispo = LossKind("cispo", level)
    assert_equal(ours(cispo, "tokens"), trl(cispo, "cispo", high=1.25))
    plain = LossKind(level=level)
    assert_equal(ours(plain, "tokens", dual_clip=1.3), trl(plain, "dapo", delta=1.3))
    found = ours(plain, "tokens", off_policy=0.05)
    assert_equal(found, trl(plain, "dapo", off_policy=0.05))
    assert not torch.equal(found[0], ours(plain, "tokens")[0])


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrections_of_the_sampler_are_those_of_trl(correction: str) -> None:
    kind, of = LossKind(correction=correction), completions_of(LOGITS, "tokens")
    weights, expected = correction_weights(correction, of, number(1.2)), plain_correction(correction, of, 1.2)  # type: ignore[arg-type]
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)
    assert ((expected == 1.2) | (expected == 0)).any() and (expected != 1.2).any()
    assert_equal(ours(kind, "tokens", correction_cap=1.2), trl(kind, "dapo"))


def test_rloo_is_that_of_trl() -> None:
    logits = LOGITS.clone().requires_grad_()
    of, (logp, entropy) = completions_of(LOGITS, "sequences", 0.1), plain_scores(logits)
    alone = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp[0], entropy[0], None),
        **{"aux_loss_enabled": False, "epsilon_low": 0.2, "epsilon_high": 0.25, "accelerator": alone},
        **{"model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)}},
    )
    inputs = {"prompt_ids": torch.zeros(B, 1), "prompt_mask": torch.ones(B, 1)}
    inputs |= {"completion_ids": TOKENS.view(B, T), "completion_mask": MASK[0].double(), "advantages": ADVANTAGES[0]}
    inputs |= {"old_logps": (of.old * of.mask).sum(-1)[0]}
    loss = method("rloo_trainer.py", "RLOOTrainer", "_compute_loss")(trainer, None, inputs)
    loss.backward()
    own = LOGITS.clone().requires_grad_()
    strengths = LossStrengths(number(0.2), number(0.25))  # type: ignore[arg-type]
    found = surrogate(LossKind(level="product"), strengths, completions_of(own, "sequences", 0.1)).loss[0]
    found.backward()
    assert own.grad is not None and logits.grad is not None
    assert_equal((found.detach(), own.grad), (loss.detach(), logits.grad))


# --- formulas, written down again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", ["tokens", "sequences", "longest"])
@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_loss_is_its_formula_token_by_token(loss: str, mean: str) -> None:
    """In loops over plain numbers, with every part on."""
    kind = LossKind(loss, "token", "k2", True, "token_truncate")
    strengths = {"dual_clip": 1.4, "beta": 0.3, "entropy": 0.02, "correction_cap": 1.1}
    found, _ = ours(kind, mean, **strengths)
    of, total, entropies = completions_of(LOGITS, mean), 0.0, 0.0
    for sequence, length in enumerate(LENGTHS.tolist()):
        weight = {"tokens": 1 / LENGTHS.sum().item(), "sequences": 1 / (B * length), "longest": 1 / (B * T)}[mean]
        advantage = ADVANTAGES[0, sequence].item()
        for token in range(length):
            logp, old, behaviour, reference = (
                x[0, sequence, token].item() for x in (of.logp, of.old, of.behaviour, of.reference)
            )
            ratio = math.exp(logp - old)
            if loss == "cispo":
                part = -min(ratio, 1.25) * advantage * logp
            else:
                part = -min(ratio * advantage, min(max(ratio, 0.8), 1.25) * advantage)
                part = min(part, -1.4 * advantage) if advantage < 0 else part
            part *= min(math.exp(old - behaviour), 1.1)
            part += 0.3 * ratio * (logp - reference) ** 2 / 2
            total += weight * part
            entropies += of.entropy[0, sequence, token].item() / LENGTHS.sum().item()
    assert found.item() == pytest.approx(total - 0.02 * entropies, rel=1e-12)


def test_gradients_of_scores_are_those_of_autograd() -> None:
    weights = [drawn(seed, 1, B * T) for seed in (7, 8, 9)]
    own, plain = (LOGITS.clone().requires_grad_() for _ in range(2))
    sum((w * x).sum() for w, x in zip(weights, token_scores(own, TOKENS), strict=True)).backward()  # type: ignore[union-attr]
    logp, entropy = (x.flatten(1) for x in plain_scores(plain))
    ((weights[0] * logp) + (weights[1] * entropy) + weights[2] * plain.logsumexp(-1)).sum().backward()
    torch.testing.assert_close(own.grad, plain.grad, rtol=1e-12, atol=1e-14)


def test_estimators_of_the_kl_are_without_bias_and_k2_has_its_gradient() -> None:
    """Exactly, by adding up over the whole vocabulary; the gradient of k1 has the mean 0, and that of k3 has a bias."""
    logits, other = drawn(10, V).requires_grad_(), drawn(11, V).log_softmax(-1)
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - other)).sum()
    (true,) = torch.autograd.grad(kl, logits, retain_graph=True)
    p = logp.exp().detach()
    for kind in KINDS:
        values = penalties(kind, logp, other)
        mean = (p * values).sum()
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        if kind != "k2":
            torch.testing.assert_close(mean.detach(), kl.detach(), rtol=1e-12, atol=0)
        expected = {"k1": torch.zeros_like(true), "k2": true}.get(kind)
        if expected is None:
            assert (gradient - true).abs().max() > 0.01
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
        weighted = (p * values * torch.exp(logp - logp.detach())).sum()
        (unbiased,) = torch.autograd.grad(weighted, logits, retain_graph=True)
        if kind != "k2":
            torch.testing.assert_close(unbiased, true, rtol=1e-12, atol=1e-14)
    assert (penalties("k3", logp, other) >= 0).all()


@pytest.mark.parametrize("baseline", ["none", "leave_one_out"])
def test_gradient_of_a_bandit_is_that_of_enumeration(baseline: str) -> None:
    """Four arms, all 16 pairs of pulls: the mean gradient is that of the expected reward, with a baseline or without.

    A group's own mean takes part of it away: with two pulls, half.
    """
    logits, worth = drawn(12, 4).requires_grad_(), torch.tensor([0.1, 0.9, 0.4, 0.3], dtype=torch.float64)
    p = logits.softmax(-1)
    (true,) = torch.autograd.grad((p * worth).sum(), logits, retain_graph=True)
    share, ends = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, 1, dtype=torch.bool)
    strengths = LossStrengths(number(0.2), number(0.2))  # type: ignore[arg-type]
    found = {name: torch.zeros(4, dtype=torch.float64) for name in (baseline, "group")}
    for pulls in itertools.product(range(4), repeat=2):
        chosen = torch.tensor([pulls])
        for name in found:
            gains = advantages(worth[chosen], 2, name, "none")
            scores = token_scores(logits.expand(1, 2, 4), chosen)
            logp, entropy = scores.log_probability[..., None], scores.entropy[..., None]
            old = logp.detach()
            of = Completions(logp, entropy, old, old, old, ends, gains, share, share)
            (gradient,) = torch.autograd.grad(surrogate(LossKind(), strengths, of).loss[0], logits, retain_graph=True)
            found[name] -= p[list(pulls)].prod().detach() * gradient
    torch.testing.assert_close(found[baseline], true, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found["group"], true / 2, rtol=1e-12, atol=1e-15)


def test_the_first_update_of_ppo_is_reinforce() -> None:
    """On policy no ratio is clipped, and the gradient is that of -A log p."""
    logits = LOGITS.clone().requires_grad_()
    of = completions_of(logits, "tokens", 0.0)
    loss = surrogate(LossKind(), LossStrengths(number(0.2), number(0.2)), of)  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(loss.loss[0], logits, retain_graph=True)
    plain = -(ADVANTAGES[..., None] * of.logp * MASK).sum() / MASK.sum()
    torch.testing.assert_close(found, torch.autograd.grad(plain, logits)[0], rtol=1e-12, atol=1e-15)
    assert (loss.ratio == 1).all() and not loss.is_clipped.any()


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_their_formulas(scale: str) -> None:
    rewards = drawn(13, 2, B)
    found = advantages(rewards, GROUP, "group", scale)
    for row in range(2):
        for place in range(B):
            of_group = rewards[row, place // GROUP * GROUP :][:GROUP]
            widths = {"group": of_group.std(), "batch": rewards[row].std(), "none": torch.tensor(1 - 1e-4)}
            expected = (rewards[row, place] - of_group.mean()) / (widths[scale] + 1e-4)
            torch.testing.assert_close(found[row, place], expected, rtol=1e-10, atol=1e-12)
    left_out = advantages(rewards, GROUP, "leave_one_out", "none").unflatten(1, (-1, GROUP))
    grouped = rewards.unflatten(1, (-1, GROUP))
    others = (grouped.sum(-1, keepdim=True) - grouped) / (GROUP - 1)
    torch.testing.assert_close(left_out, grouped - others, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("baseline", "group"), [("group", 1), ("group", GROUP), ("leave_one_out", GROUP)])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_no_spread_is_no_advantage(baseline: str, scale: str, group: int) -> None:
    """Exactly 0, though the mean of equal numbers is not always one of them; and the gradient is 0, not NaN."""
    rewards = torch.full((1, B), 0.1, dtype=torch.float64)
    gains = advantages(rewards, group, baseline, scale)
    assert (gains == 0).all()
    assert zero_spread(rewards, group).item() == 1 and (spread(rewards) == 0).all()
    logits = LOGITS.clone().requires_grad_()
    of = replace(completions_of(logits, "tokens"), advantages=gains)
    surrogate(LossKind(), LossStrengths(number(0.2), number(0.2)), of).loss[0].backward()  # type: ignore[arg-type]
    assert logits.grad is not None and (logits.grad == 0).all()
