"""A policy that samples what it trains on: its rollouts as state, their common random numbers, and who disagrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config.trial import Playbook
from harness.model.key_values import KeyValues
from harness.objectives.outcome import DIVERGENT, NEVER_LEARNED, NON_FINITE, TRAINED, judge_rewards
from harness.policy.penalty import PenaltyConstant
from harness.policy.rollouts import Rollouts
from harness.policy.sampling import TEXT, drawn, streams_of
from harness.policy.sampling import uniforms as uniforms_of
from harness.rewards.base import cumulated
from harness.testing import check_setting, engine
from harness.testing.changes import Change, fill_first
from harness.training.pack import Pack
from harness.training.sites import Site

SMALL: dict[str, Any] = {"objective": {"name": "policy"}, "context": 11, "batch": 4, "steps": 6, "lr": 0.03}
SMALL |= {"policy.count": {"token": 3}, "warmup": 1, "decay": "constant"}


def policy(seed: int = 0, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    of = {"reward": "count", "group": 2, "prompt": 3, **(options or {})}
    return engine.trial(**{**SMALL, "policy": of, "seed": seed, **fields})


def uniforms(seeds: list[int], rollouts: list[int], shape: tuple[int, ...], place: str) -> Tensor:
    return uniforms_of(streams_of(seeds, rollouts, [place])[0], shape)


def rollouts_of(pack: Pack) -> Rollouts:
    found: Rollouts = pack.objective.rollouts  # type: ignore[attr-defined]
    return found


def test_several_steps_on_a_rollout_keep_the_promises_of_settings() -> None:
    """Isolation, independence of the pack, forks, checkpoints, on two ranks; one step a rollout is in FEATURES."""
    of = {"reward": "copy", "group": 2, "updates": 2, "sampler": "bf16", "beta": 0.1, "mean": "longest"}
    check_setting(objective={"name": "policy"}, batch=2, ranks=2, policy=of)


# --- sampling --------------------------------------------------------------------------------------------------------


def test_random_numbers_are_functions_of_seed_rollout_sequence_and_position() -> None:
    found = uniforms([1, 2, 1], [0, 0, 5], (4, 9), TEXT)
    assert found.dtype == torch.float64 and (found >= 0).all() and (found < 1).all()
    assert len(found.unique()) == found.numel()
    assert torch.equal(uniforms([2], [0], (4, 9), TEXT)[0], found[1])
    assert torch.equal(uniforms([1], [0], (2, 9), TEXT)[0], found[0, :2])
    many = uniforms([0], [0], (100_000,), TEXT)
    assert many.mean().item() == pytest.approx(0.5, abs=4 * (1 / 12 / 1e5) ** 0.5)


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -30.0]])
    count = 40_000
    chances = uniforms([3], [0], (count,), TEXT)
    tokens = drawn(logits[None].expand(1, count, 4), chances)[0]
    shares = torch.bincount(tokens, minlength=4).double() / count
    torch.testing.assert_close(shares, logits[0].double().softmax(-1), rtol=0, atol=0.01)
    assert (drawn(logits[None], torch.tensor([[0.0]])) == 0).all()
    assert (drawn(torch.full((1, 1, 4), torch.nan), torch.tensor([[0.5]])) == 0).all()


def test_running_sums_of_an_accelerator_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = uniforms([0], [0], (3, 13), TEXT)
    monkeypatch.setattr("harness.basics.devices.CPUS", ())
    torch.testing.assert_close(cumulated(x), x.cumsum(-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "placement": "post"}, {"residual_streams": 2}])
def test_a_token_that_is_read_alone_is_read_as_with_all_before_it(fields: dict[str, Any]) -> None:
    pack = engine.pack_of([engine.trial(seed=seed, context=9, precision="fp64", **fields) for seed in range(2)])
    tokens, cache = pack.batch(0)[:, :, :9], KeyValues()
    with torch.no_grad():
        whole = pack.model(tokens).unflatten(1, tokens.shape[1:])
        for end in range(3, 10):
            last = pack.model.last_logits(tokens[:, :, 0 if end == 3 else end - 1 : end], slice(None), cache)
            torch.testing.assert_close(last, whole[:, :, end - 1], rtol=1e-10, atol=1e-12)


def test_completions_are_what_the_model_would_draw() -> None:
    """Token by token from whole passes of a plain model of those weights, and their log-probabilities too."""
    trials = [policy(seed, {"end": 7, "temperature": 0.7}, precision="fp64", steps=1, lr=0.0) for seed in range(2)]
    pack = engine.run(trials).pack
    rollouts, other = rollouts_of(pack), engine.pack_of(trials)
    tokens, prompt = rollouts.tokens, 3
    chances = uniforms([0, 1], [0, 0], (4, 9), TEXT)
    with torch.no_grad():
        logits = other.model(tokens[:, :, :-1]).unflatten(1, (4, 11)) / 0.7
    mask = rollouts.mask
    for place in range(9):
        expected = drawn(logits[:, :, prompt - 1 + place], chances[:, :, place])
        is_over = ~mask[:, :, place]
        assert torch.equal(tokens[:, :, prompt + place], torch.where(is_over, 7, expected))
    logp = logits.log_softmax(-1)[:, :, prompt - 1 :].gather(-1, tokens[:, :, prompt:, None])[..., 0]
    for found in (rollouts.old, rollouts.behaviour, rollouts.reference):
        torch.testing.assert_close(found, logp, rtol=1e-10, atol=1e-12)
    windows = other.batch(0)
    assert torch.equal(tokens[:, :, :prompt], windows[:, :, :prompt])
    assert torch.equal(windows[:, 0], windows[:, 1]) and not torch.equal(windows[:, 0], windows[:, 2])
    ends = (tokens[:, :, prompt:] == 7).long()
    assert torch.equal(mask, ends.cumsum(-1) - ends == 0)


# --- what a row keeps ------------------------------------------------------------------------------------------------


def test_a_rollout_serves_as_many_steps_as_it_is_asked_to() -> None:
    seen: list[Tensor] = []

    def listen(pack: Pack) -> None:
        learn = pack.learn
        pack.learn = lambda batch, *rest, **named: (seen.append(batch.clone()), learn(batch, *rest, **named))[1]  # type: ignore[method-assign]

    run = engine.run([policy(seed, {"updates": 3}) for seed in range(2)], prepare=listen)
    assert all(torch.equal(seen[step], seen[step // 3 * 3]) for step in range(6))
    assert not torch.equal(seen[0], seen[3])
    assert (run.signals["ratio_max"][:, [0, 3]] == 1).all() and (run.signals["ratio_max"][:, [1, 2, 4, 5]] != 1).all()
    assert (run.signals["effective_samples"] <= 1 + 1e-12).all()
    quality = run.signals["quality"]
    assert (quality[:, [0, 3]] == quality[:, [1, 4]]).all()
    np.testing.assert_allclose(run.signals["loss"], -quality, rtol=1e-6)


def test_it_goes_on_from_a_checkpoint_between_two_rollouts(tmp_path: Path) -> None:
    """Each time with what was sampled, and with the same reference: bit for bit."""
    options = {"updates": 3, "sampler_lag": 1, "beta": 0.1, "beta_schedule": "adaptive", "kl_target": 0.1}
    engine.assert_resumes([policy(seed, options) for seed in range(2)], tmp_path, kills=[2, 3, 5])


def test_after_a_roll_back_it_samples_the_same() -> None:
    """A row that was struck, and went back behind a rollout, ends as if nothing had been."""
    ladder = '[{"detector": "any", "action": "roll_back", "limit": 1, "cool_down": 0}]'
    own = {"detect": {"name": "finite"}, "playbook": Playbook("own", ladder)}
    own |= {"playbook.roll_back": {"back": 2}, "playbook.snapshot": {"every": 1, "kept": 4}}
    trial = policy(0, {"updates": 2, "beta": 0.1}, steps=9, **own)
    ruin = Change(Site.REDUCED_GRADIENT, range(5, 6), fill_first("embedding", np.nan))
    run = engine.run([trial, trial], {1: ruin}, block=20)
    assert run.result.incidents[1]
    for name, values in run.pack.rows_state:
        if name.startswith(("rollout_", "weights", "penalty")):
            assert torch.equal(values[0], values[1]), name


def test_twins_share_their_noise_after_a_strike() -> None:
    """Equal up to it; afterwards most of what they sample is still the same, though their weights are not."""
    trial, other = policy(0, steps=4, lr=1e-3), policy(1, steps=4, lr=1e-3)
    nudge = Change(Site.WEIGHT, range(2, 3), lambda tensors: tensors["embedding"].mul_(1.001))
    run = engine.run([trial, trial, other], {1: nudge}, block=1)
    tokens = rollouts_of(run.pack).tokens[:, :, 3:]
    assert not torch.equal(run.weights[-1][0], run.weights[-1][1])
    same, unlike = ((tokens[0] == tokens[row]).double().mean().item() for row in (1, 2))
    assert same > 0.9 > unlike + 0.5


def test_the_reference_is_the_start() -> None:
    """Without a step there is no distance; with steps, what the penalty allows."""
    still = engine.run([policy(seed, lr=0.0) for seed in range(2)])
    assert (still.signals["reference_kl"] == 0).all() and (still.signals["reference_kl_k3"] == 0).all()
    free, held = (engine.run([policy(s, {"beta": beta}, steps=25) for s in range(2)], block=25) for beta in (0.0, 10.0))
    assert (free.signals["reference_kl_k3"][:, -5:].mean(1) > 3 * held.signals["reference_kl_k3"][:, -5:].mean(1)).all()


def test_a_policy_learns_what_it_is_rewarded_for() -> None:
    run = engine.run([policy(seed, {"group": 4}, steps=60, batch=8, lr=1e-2) for seed in range(2)], block=60)
    quality = run.signals["quality"]
    assert (quality[:, -5:].mean(1) > quality[:, :5].mean(1) + 0.2).all()


# --- a sampler that is not the trainer -------------------------------------------------------------------------------


def ends(run: engine.Run, number: int) -> list[Tensor]:
    return [run.weights[-1][number], torch.from_numpy(run.signals["loss"][number])]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"sampler_noise": 0.0}, {}),
        ({"sampler": "fp32"}, {}),
        ({"sampler": "bf16"}, {"precision": "bf16"}),
        ({"sampler_temperature": 1.0}, {}),
        ({"correction": "token_truncate"}, {}),
        ({"correction": "sequence_mask", "off_policy": 10.0}, {}),
        ({"beta": 0.0, "entropy": 0.0, "dual_clip": 1e6}, {}),
    ],
    ids=lambda x: "+".join(x) or "plain",
)
def test_no_mismatch_is_bitwise_the_control(options: dict[str, Any], fields: dict[str, Any]) -> None:
    own = {"updates": 2}
    control = engine.run([policy(seed, own, **fields) for seed in range(2)])
    found = engine.run([policy(seed, own | options, **fields) for seed in range(2)])
    for number in range(2):
        assert all(torch.equal(*pair) for pair in zip(ends(control, number), ends(found, number), strict=True))
    assert (found.signals["mismatch_max"] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"sampler_noise": 0.1},
        {"sampler": "bf16"},
        {"sampler": "fp16"},
        {"sampler": "fp8"},
        {"sampler_temperature": 1.1},
    ],
)
def test_a_mismatch_is_seen(options: dict[str, Any]) -> None:
    run = engine.run([policy(seed, options) for seed in range(2)])
    assert (run.signals["mismatch_max"] > 0).all()
    if options.get("sampler") == "fp8":  # its noise is the largest of the formats
        assert run.signals["mismatch"].mean() > 0


def test_a_sampler_that_lags_has_the_weights_of_so_many_rollouts_before() -> None:
    """The first rollouts are sampled by the start, whose log-probabilities are the reference's."""
    seen: list[tuple[Tensor, Tensor]] = []

    def listen(pack: Pack) -> None:
        learn, of = pack.learn, rollouts_of(pack)
        pack.learn = lambda *given, **named: (  # type: ignore[method-assign]
            seen.append((of.behaviour.clone(), of.reference.clone())),
            learn(*given, **named),
        )[1]

    run = engine.run([policy(seed, {"sampler_lag": 2, "group": 4}) for seed in range(2)], prepare=listen)
    assert all(torch.equal(*seen[step]) for step in range(3))
    assert not torch.equal(*seen[4])
    assert (run.signals["mismatch_max"][:, 0] == 0).all() and (run.signals["mismatch_max"][:, -1] > 0).all()


def test_strikes_at_the_sampler_at_rewards_and_at_advantages() -> None:
    """Each is 0.0 before and visible afterwards; the sampler's copy is struck for one rollout, the trainer never."""
    struck = {
        Site.SAMPLER_WEIGHT: lambda tensors: tensors["embedding"].mul_(2.0),
        Site.REWARD: lambda tensors: tensors["reward"].neg_(),
        Site.ADVANTAGE: lambda tensors: tensors["advantage"].copy_(tensors["advantage"].roll(1)),
    }
    trials = [policy(0, {"group": 4}, batch=8, lr=3e-3)] * 4
    changes = {number: Change(site, range(3, 4), change) for number, (site, change) in enumerate(struck.items(), 1)}
    run = engine.run(trials, changes)
    mismatch, loss = run.signals["mismatch_max"], run.signals["loss"]
    assert (mismatch[1, :3] == 0).all() and mismatch[1, 3] > 0 and (mismatch[1, 4:] == 0).all()
    assert (mismatch[[0, 2, 3]] == 0).all()
    assert (loss[2:, :4] == loss[0, :4]).all()  # the quality is the same: what is made of it is not
    for number in range(1, 4):
        assert torch.equal(run.weights[2][0], run.weights[2][number])
        assert not torch.equal(run.weights[3][0], run.weights[3][number])


def test_a_sampler_of_nan_is_the_largest_mismatch_and_an_alarm() -> None:
    """NaN in a reading is what was not measured; here the trainer and its loss are finite, so nobody else would say."""
    trials = [policy(0, {"group": 4}, batch=8, lr=3e-3, detect={"name": "policy_mismatch"})] * 2
    change = Change(Site.SAMPLER_WEIGHT, range(3, 4), lambda tensors: tensors["embedding"].fill_(torch.nan))
    run = engine.run(trials, {1: change})
    for name in ("mismatch", "mismatch_max"):
        assert np.isposinf(run.signals[name][1, 3]) and (run.signals[name][1, [0, 1, 2, 4, 5]] == 0).all()
    assert run.signals["alarm_policy_mismatch"].tolist() == [[0] * 6, [0, 0, 0, 1, 0, 0]]
    assert np.isfinite(run.signals["loss"]).all() and np.isfinite(run.weights[-1][1].numpy()).all()


# --- penalties, outcomes ---------------------------------------------------------------------------------------------


def test_schedules_of_the_penalty_have_the_same_mean() -> None:
    names = ("constant", "rising", "falling")
    trials = [policy(0, {"beta": 0.2, "beta_schedule": name}) for name in names]
    beta = engine.run(trials).signals["penalty"]
    np.testing.assert_allclose(beta.mean(1), 0.2, rtol=1e-6)
    np.testing.assert_allclose(beta[1], 0.4 * np.arange(6) / 5, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(beta[2], beta[1][::-1], rtol=1e-6, atol=1e-9)


def test_an_adaptive_penalty_is_that_of_ziegler_et_al() -> None:
    """With its numbers, by hand: e is cut off at 0.2, and K_beta is 0.1."""
    trials = [policy(0, {"beta": 0.5, "beta_schedule": name, "kl_target": 4.0}) for name in ("adaptive", "constant")]
    pack = engine.pack_of([*trials, trials[0]])
    penalty: PenaltyConstant = rollouts_of(pack).penalty
    here, steps = torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.int64)
    expected = 0.5
    for kl, error in ((8.0, 0.2), (4.4, 0.1), (1.0, -0.2), (float("nan"), 0.0)):
        penalty.adapt(torch.full((3,), kl), here)
        expected *= 1 + 0.1 * error
        assert penalty.at(steps).tolist() == pytest.approx([expected, 0.5, 0.5], rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "outcome"),
    [
        (lambda x: 0.1 + 0.5 * x, TRAINED),
        (lambda x: 0.1 + 0 * x, NEVER_LEARNED),
        (lambda x: 0.1 + np.minimum(x, 0.5) - 1.2 * np.maximum(x - 0.7, 0), DIVERGENT),
        (lambda x: 0.1 + np.minimum(x, 0.5) - 0.5 * np.maximum(x - 0.7, 0), TRAINED),
    ],
)
def test_outcomes_follow_the_written_rule(shape: Any, outcome: str) -> None:
    noise = 0.01 * np.random.default_rng(0).standard_normal(300)
    reward = shape(np.linspace(0, 1, 300)) + noise
    assert judge_rewards(reward, None) == outcome
    assert judge_rewards(reward, 12) == NON_FINITE
