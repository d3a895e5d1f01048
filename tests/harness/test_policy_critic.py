"""Critics, minibatches, and constants that adapt, against torchrl's and TRL's own code, enumeration, and by hand."""

from __future__ import annotations

import importlib.util
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.model.layers import Leaf
from harness.policy.critic import (
    Values,
    estimated_advantages,
    explained,
    state_values,
    token_rewards,
    value_loss,
    whitened,
)
from harness.policy.losses import Completions, LossKind, LossStrengths, surrogate
from harness.policy.minibatches import Minibatches
from harness.policy.probabilities import token_scores
from harness.testing import engine
from tests.harness.test_policy import policy, rollouts_of
from tests.harness.test_policy_losses import LENGTHS, LOGITS, MASK, TOKENS, B, T, V, completions_of, drawn, number

COUNT = int(LENGTHS.sum())
OLD_VALUES, REWARDS = drawn(21, 1, B, T, scale=0.5), drawn(22, 1, B)
NEW_VALUES = OLD_VALUES + drawn(23, 1, B, T, scale=0.3)
PENALTIES = 0.1 * drawn(24, 1, B, T)


def torchrl(name: str) -> Any:
    """A module of torchrl, which the development group has without what it asks for."""
    missing = [part for part in ("torchrl", "tensordict") if importlib.util.find_spec(part) is None]
    if missing:
        reason = f"needs {' and '.join(missing)}: make install"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return importlib.import_module(name)


def strengths(**given: float) -> LossStrengths:
    return LossStrengths(**{name: number(x) for name, x in {"clip_low": 0.2, "clip_high": 0.25, **given}.items()})  # type: ignore[arg-type]


def values_of(now: Tensor, returns: Tensor, weight: float, clip: float) -> Values:
    return Values(now, OLD_VALUES, returns, number(weight), number(clip))  # type: ignore[arg-type]


def gains_of(gamma: float, gae: float) -> Tensor:
    rewards = token_rewards(REWARDS, PENALTIES, MASK)
    numbers = (torch.tensor([x], dtype=torch.float64) for x in (gamma, gae))
    return estimated_advantages(rewards, OLD_VALUES, MASK, *numbers)


# --- torchrl's own code ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "gae"), [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_are_those_of_torchrl(gamma: float, gae: float) -> None:
    """Completion by completion, each as long as it is."""
    estimate = torchrl("torchrl.objectives.value.functional").generalized_advantage_estimate
    rewards, found = token_rewards(REWARDS, PENALTIES, MASK), gains_of(gamma, gae)
    for place, length in enumerate(LENGTHS.tolist()):
        reward, value = (x[0, place, :length, None] for x in (rewards, OLD_VALUES))
        done = torch.arange(length)[:, None] == length - 1
        after = torch.cat((value[1:], torch.full((1, 1), 7.0, dtype=torch.float64)))  # which nobody is to read
        constants = (torch.tensor(x, dtype=torch.float64) for x in (gamma, gae))  # of plain numbers it makes float32
        expected, returns = estimate(*constants, value, after, reward, done)
        torch.testing.assert_close(found[0, place, :length, None], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((found + OLD_VALUES)[0, place, :length, None], returns, rtol=1e-12, atol=1e-14)
    assert (found[~MASK] == 0).all()


@pytest.mark.parametrize("clip", [0.25, None])
def test_loss_and_gradients_are_those_of_torchrl(clip: float | None) -> None:
    """Of the policy, the entropy and the critic: as torchrl adds them up, over tokens that count.

    With constants that float32 holds, from which torchrl makes them.
    """
    objectives, nn, torch_rl = torchrl("torchrl.objectives"), torchrl("tensordict.nn"), torchrl("tensordict")
    gains = gains_of(1.0, 0.95)
    returns, gains = gains + OLD_VALUES, whitened(gains, MASK)
    logits, now = LOGITS.clone().requires_grad_(), NEW_VALUES.clone().requires_grad_()
    of = completions_of(logits, "tokens")
    of = Completions(**{**vars(of), "advantages": gains})
    ours = surrogate(LossKind(), strengths(clip_low=0.1875, entropy=0.03125), of).loss[0]
    found = value_loss(values_of(now, returns, 0.5, float("inf") if clip is None else clip), of.token_share, MASK)
    (ours + found.loss[0]).backward()

    class Table(torch.nn.Module):
        """A number, or several, of each token."""

        def __init__(self, values: Tensor):
            super().__init__()
            self.values = torch.nn.Parameter(values.clone())

        def forward(self, place: Tensor) -> Tensor:
            return self.values[place]

    actor, critic = Table(LOGITS.view(B * T, V)), Table(NEW_VALUES.view(B * T, 1))
    torch_rl_actor = nn.ProbabilisticTensorDictSequential(
        nn.TensorDictModule(actor, in_keys=["place"], out_keys=["logits"]),
        nn.ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )
    loss_module = objectives.ClipPPOLoss(
        torch_rl_actor,
        nn.TensorDictModule(critic, in_keys=["place"], out_keys=["state_value"]),
        **{"clip_epsilon": (0.1875, 0.25), "entropy_coeff": 0.03125, "critic_coeff": 0.25, "loss_critic_type": "l2"},
        **{"clip_value": clip, "functional": False, "normalize_advantage": False},
    ).double()
    counts = MASK.flatten()
    data = torch_rl.TensorDict(
        {
            "place": torch.arange(B * T)[counts],
            "action": TOKENS.flatten()[counts],
            "action_log_prob": of.old.flatten()[counts],
            "advantage": gains.flatten()[counts, None],
            "value_target": returns.flatten()[counts, None],
            "state_value": OLD_VALUES.flatten()[counts, None],
        },
        [COUNT],
    )
    expected = loss_module(data)
    total = expected["loss_objective"] + expected["loss_entropy"] + expected["loss_critic"]
    total.backward()
    torch.testing.assert_close(ours.detach() + found.loss[0].detach(), total.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.loss[0].detach(), expected["loss_critic"].detach(), rtol=1e-10, atol=1e-12)
    for left, right in ((logits.grad, actor.values.grad), (now.grad, critic.values.grad)):
        assert left is not None and right is not None and right.any()
        torch.testing.assert_close(left.view_as(right), right, rtol=1e-10, atol=1e-12)
    assert bool(found.is_clipped[MASK].any()) == (clip is not None)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # its controller gives numpy a tensor
def test_an_adaptive_penalty_is_that_of_torchrl() -> None:
    """Which is given what is taken off rewards, and says over what horizon of samples its constant moves."""
    utils = torchrl("torchrl.data.llm.utils")
    controller = utils.AdaptiveKLController(init_kl_coef=0.5, target=4.0, horizon=10)
    trial = policy(0, {"beta": 0.5, "beta_schedule": "adaptive", "kl_target": 4.0}, precision="fp64")
    penalty = rollouts_of(engine.pack_of([trial, trial])).penalty
    here, steps = torch.tensor([True, True]), torch.zeros(2, dtype=torch.int64)
    for kl in (8.0, 4.4, 1.0, 3.9, 4.0):
        penalty.adapt(torch.full((2,), kl, dtype=torch.float64), here)
        expected = controller.update(-controller.coef * torch.tensor([kl], dtype=torch.float64))
        assert penalty.at(steps)[0].item() == pytest.approx(float(expected), rel=1e-12)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    gains = gains_of(1.0, 0.95)
    found, chosen = whitened(gains, MASK), gains[MASK]
    torch.testing.assert_close(found[MASK], (chosen - chosen.mean()) / chosen.std(), rtol=1e-12, atol=1e-14)
    assert (found[~MASK] == 0).all()
    assert (whitened(torch.full_like(gains, 0.1), MASK) == 0).all()  # not rounding, made large


def test_the_penalty_of_a_token_is_taken_off_where_it_is_paid() -> None:
    """Together they are what is taken off the whole completion; without a discount advantages see all of it."""
    rewards = token_rewards(REWARDS, PENALTIES, MASK)
    expected = REWARDS - torch.where(MASK, PENALTIES, 0.0).sum(-1)
    torch.testing.assert_close(rewards.sum(-1), expected, rtol=1e-12, atol=1e-14)
    zeros, one = torch.zeros_like(OLD_VALUES), torch.ones(1, dtype=torch.float64)
    gains = estimated_advantages(rewards, zeros, MASK, one, one)
    torch.testing.assert_close(gains[..., 0], expected, rtol=1e-12, atol=1e-14)


def test_the_share_of_variance_that_values_explain() -> None:
    returns = drawn(25, 1, B, T)
    exact, mean = returns, torch.full_like(returns, returns[MASK].mean().item())
    for values, share in ((exact, 1.0), (mean, 0.0)):
        assert explained((values - returns) ** 2, returns, MASK).item() == pytest.approx(share, abs=1e-12)
    assert explained(returns, torch.ones_like(returns), MASK).isnan().all()


def test_gradients_of_values_are_those_of_autograd() -> None:
    states, weight, by = drawn(26, 2, 9, 4), drawn(27, 2, 1, 4), drawn(28, 2, 9)
    own, gradient = states.clone().requires_grad_(), torch.full_like(weight, 7.0)
    found = state_values(own, Leaf(weight, gradient))
    (by * found).sum().backward()
    plain, of_weight = states.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = (plain * of_weight).sum(-1)
    (by * expected).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    for left, right in ((own.grad, plain.grad), (gradient, of_weight.grad)):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("value", [0.0, 0.35, -2.0])
def test_gradient_of_a_bandit_with_a_critic_is_that_of_enumeration(value: float) -> None:
    """Four arms: whatever the critic says, the mean gradient is that of the expected reward.

    And the critic's mean gradient is that of half its squared distance to the mean reward.
    """
    logits, worth = drawn(12, 4).requires_grad_(), torch.tensor([0.1, 0.9, 0.4, 0.3], dtype=torch.float64)
    p = logits.softmax(-1)
    (true,) = torch.autograd.grad((p * worth).sum(), logits, retain_graph=True)
    says = torch.full((1, 2, 1), value, dtype=torch.float64).requires_grad_()
    share, ends = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 2, 1, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    found, of_critic = torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for pulls in itertools.product(range(4), repeat=2):
        chosen = torch.tensor([pulls])
        gains = estimated_advantages(token_rewards(worth[chosen], None, ends), says.detach(), ends, one, one)
        scores = token_scores(logits.expand(1, 2, 4), chosen)
        logp, entropy = scores.log_probability[..., None], scores.entropy[..., None]
        old = logp.detach()
        of = Completions(logp, entropy, old, old, old, ends, gains, share, share)
        values = Values(says, says.detach(), gains + says.detach(), number(1.0), number(0.2))  # type: ignore[arg-type]
        loss = surrogate(LossKind(), strengths(), of).loss[0] + value_loss(values, share, ends).loss[0]
        gradient, of_value = torch.autograd.grad(loss, (logits, says), retain_graph=True)
        chance = p[list(pulls)].prod().detach()
        found -= chance * gradient
        of_critic += chance * of_value.sum()
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(of_critic, value - (p * worth).sum().detach(), rtol=1e-12, atol=1e-15)


def test_minibatches_go_over_all_completions_once_and_then_again() -> None:
    """Of each row at its own step; in an order that seed, rollout and pass decide."""
    parts = Minibatches(3, 6, 6, torch.device("cpu"))
    seen = []
    for step in range(12):
        parts.stand_at([1, 2], [step, step + 6])
        index = parts.index()
        assert index is not None and index.shape == (2, 2)
        seen.append(index)
    for first in (0, 3, 6, 9):
        over = torch.cat(seen[first : first + 3], 1)
        assert torch.equal(over.sort(-1).values, torch.arange(6).expand(2, 6))
    passes = [torch.cat(seen[first : first + 3], 1) for first in (0, 3, 6)]
    assert not torch.equal(passes[0], passes[1]) and not torch.equal(passes[0], passes[2])
    parts.stand_at([2, 1], [9, 7])  # apart
    apart = parts.index()
    assert apart is not None
    assert torch.equal(apart[0], seen[3][1]) and torch.equal(apart[1], seen[7][0])
    assert Minibatches(1, 6, 6, torch.device("cpu")).index() is None


def test_a_bonus_on_entropy_adapts_as_trl_has_it() -> None:
    """Rollout by rollout: the constant moves by what was measured, and acts if the last entropy was low enough."""
    trials = [policy(0, {"entropy_target": 0.2, "entropy": start}) for start in (0.0, 0.998)]
    pack = engine.pack_of([*trials, trials[0]])
    constant = rollouts_of(pack).entropy
    assert constant is not None
    here = torch.tensor([True, True, False])
    held, last = [0.0, 0.998], [float("inf")] * 2
    for entropy in (0.5, 0.2, 0.1, 0.1, 0.3, 0.2, 0.9):
        constant.adapt(torch.full((3,), entropy, dtype=torch.float64), here)
        expected = []
        for row in range(2):  # as GRPOTrainer._compute_loss: what is applied first, and then what is held
            expected.append(held[row] if last[row] <= 0.2 else 0.0)
            held[row] = min(held[row] + 0.005, 1.0) if entropy <= 0.2 else max(held[row] - 0.005, 0.0)
            last[row] = entropy
        assert constant.now.tolist() == pytest.approx([*expected, 0.0], abs=1e-15)
