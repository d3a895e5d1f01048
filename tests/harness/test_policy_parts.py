"""Critics, minibatches, mixed-in text and a bonus that adapts, in real packs: promises, gradients and rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config import ConfigError
from harness.config.trial import Playbook
from harness.objectives.loss import cross_entropy
from harness.policy.step_measures import STEP_TAP, TEXT_TAP, VALUE_TAP
from harness.testing import check_setting, engine
from harness.testing.changes import Change, fill_first
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from harness.training.sites import Site
from tests.harness.test_policy import policy, rollouts_of

CRITIC: dict[str, Any] = {"critic": True, "baseline": "none", "scale": "batch", "kl_in": "reward", "kl": "k1"}
CRITIC |= {"beta": 0.1, "end": 5}
PARTS: dict[str, Any] = {**CRITIC, "updates": 4, "minibatches": 2, "mix_in": 0.5, "entropy_target": 4.0}


def test_they_keep_the_promises_of_settings() -> None:
    """Isolation, independence of the pack, forks, checkpoints, on two ranks, with all of them on."""
    of = {"reward": "copy", "group": 2, **PARTS, "updates": 2}
    check_setting(
        objective={"name": "policy"}, batch=4, ranks=2, policy=tuple({**of, "gae": gae} for gae in (0.9, 1.0))
    )


def test_they_go_on_from_a_checkpoint_between_two_rollouts(tmp_path: Path) -> None:
    engine.assert_resumes([policy(seed, PARTS, steps=9) for seed in range(2)], tmp_path, kills=[2, 5, 7])


def test_after_a_roll_back_they_do_the_same() -> None:
    """A row that was struck, and went back behind a rollout, ends as if nothing had been; the rows then stand apart."""
    ladder = '[{"detector": "any", "action": "roll_back", "limit": 1, "cool_down": 0}]'
    own = {"detect": {"name": "finite"}, "playbook": Playbook("own", ladder)}
    own |= {"playbook.roll_back": {"back": 3}, "playbook.snapshot": {"every": 1, "kept": 5}}
    trial = policy(0, PARTS, steps=9, **own)
    ruin = Change(Site.REDUCED_GRADIENT, range(5, 6), fill_first("embedding", np.nan))
    run = engine.run([trial, trial], {1: ruin}, block=20)
    assert run.result.incidents[1]
    for name, values in run.pack.rows_state:
        if name.startswith(("rollout_", "weights", "penalty", "entropy")):
            assert torch.equal(values[0], values[1]), name


def test_minibatches_change_what_trains_and_not_what_is_sampled_first() -> None:
    seen: dict[int, list[Tensor]] = {}

    def listen(pack: Pack) -> None:
        learn, kept = pack.learn, seen.setdefault(len(seen), [])
        pack.learn = lambda batch, *rest, **named: (kept.append(batch.clone()), learn(batch, *rest, **named))[1]  # type: ignore[method-assign]

    options = {"updates": 4, "group": 4}
    for count in (1, 2):
        engine.run([policy(s, {**options, "minibatches": count}, batch=8, steps=4) for s in range(2)], prepare=listen)
    whole, parts = seen.values()
    assert [part.shape[1] for part in parts] == [4] * 4
    for first in (0, 2):
        over = torch.cat(parts[first : first + 2], 1)
        for row in range(2):
            assert sorted(over[row].tolist()) == sorted(whole[0][row].tolist())
    assert not torch.equal(parts[0], parts[2])


def test_gradients_of_all_parts_are_those_of_differences() -> None:
    """In float64: of the policy's loss, the critic's, and that of text, along a random direction."""
    pack = engine.run([policy(s, {**PARTS, "entropy": 0.2}, precision="fp64", steps=3, lr=0.02) for s in range(2)]).pack
    shown: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        shown[name] = x.clone()

    for tap in (STEP_TAP, VALUE_TAP, TEXT_TAP):
        pack.model.taps.attach(tap, keep)
    tokens = pack.objective.rolled_out(torch.empty(0))

    def loss() -> Tensor:
        with torch.no_grad():
            pack.loss(tokens)
        return shown[STEP_TAP][:, 0] + shown[VALUE_TAP][:, 0] + 0.5 * shown[TEXT_TAP][:, 0]

    pack.learn(tokens)
    gradients, start = pack.gradients.clone(), pack.weights.clone()
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    direction[:, pack.layout.padding] = 0
    sides = []
    for sign in (1, -1):
        pack.weights.copy_(start + sign * 1e-5 * direction)
        sides.append(loss())
    expected = (sides[0] - sides[1]) / 2e-5
    torch.testing.assert_close((gradients * direction).sum(1), expected, rtol=1e-6, atol=1e-9)
    head = pack.layout.view(gradients, "value_head")
    assert head.shape[1:] == (1, 16) and head.any()


def test_text_that_is_mixed_in_adds_its_own_gradient() -> None:
    """That of the loss of next tokens on the windows of the step, times the constant, in float64."""
    packs = [
        engine.run([policy(s, {"mix_in": g}, precision="fp64", steps=1, lr=0.0) for s in range(2)]).pack
        for g in (None, 0.3)
    ]
    found = []
    for pack in packs:
        tokens = pack.objective.rolled_out(torch.empty(0))
        pack.learn(tokens)
        found.append(pack.gradients.clone())
    pack = packs[0]
    windows = pack.objective.batches(0)  # type: ignore[attr-defined]
    logits = pack.model(windows[:, :, :-1])
    cross_entropy(logits, windows[:, :, 1:].flatten(1)).sum().backward()
    torch.testing.assert_close(found[1] - found[0], 0.3 * pack.gradients, rtol=1e-10, atol=1e-13)


def test_text_holds_what_a_policy_would_forget() -> None:
    free, held = (
        engine.run([policy(s, {"mix_in": g, "group": 4}, steps=60, batch=8, lr=1e-2) for s in range(2)], block=60)
        for g in (None, 1.0)
    )
    ends = [run.result.ends["final_segment_loss"] for run in (free, held)]
    assert (np.nanmean(ends[0], 1) > np.nanmean(ends[1], 1) + 0.5).all()
    assert (held.signals["text_loss"][:, -1] < held.signals["text_loss"][:, 0]).all()
    assert (held.signals["quality"][:, -5:].mean(1) > held.signals["quality"][:, :5].mean(1) + 0.05).all()


def test_a_policy_with_a_critic_learns_and_so_does_the_critic() -> None:
    of = {"critic": True, "baseline": "none", "scale": "batch", "updates": 4, "minibatches": 2, "value_loss": 1.0}
    of |= {"value_clip": None}
    run = engine.run([policy(seed, of, steps=240, batch=8, lr=1e-2) for seed in range(2)], block=60)
    quality, errors = run.signals["quality"], 2 * run.signals["value_loss"]
    assert (quality[:, -20:].mean(1) > quality[:, :20].mean(1) + 0.2).all()
    assert (errors[:, -20:].mean(1) < 0.1 * quality[:, -20:].mean(1) ** 2).all()  # that of a critic who says 0


def test_advantages_of_tokens_can_be_struck() -> None:
    """Values are then what they were, and so are the losses of critics up to there."""
    trials = [policy(0, {**CRITIC, "group": 4}, batch=8, lr=3e-3)] * 2
    change = Change(Site.ADVANTAGE, range(3, 4), lambda tensors: tensors["advantage"].neg_())
    run = engine.run(trials, {1: change})
    assert rollouts_of(run.pack).advantages.shape == (2, 8, 9)
    losses = run.signals["value_loss"]
    assert (losses[0, :4] == losses[1, :4]).all() and losses[0, 4] != losses[1, 4]


def test_a_critic_starts_from_weights_without_one(tmp_path: Path) -> None:
    """With a value head of zeros; and without a critic, a stored head is left out."""
    file = tmp_path / "w.safetensors"
    pack = engine.pack_of([policy(0), policy(1)])
    names = [scaled.name for scaled in pack.layout.tensors]
    save_file({name: pack.layout.view(pack.weights, name)[0].contiguous() for name in names}, file)
    started = engine.pack_of([policy(seed, CRITIC, start=str(file)) for seed in range(2)])
    assert (started.layout.view(started.weights, "value_head") == 0).all()
    save_file({**load_file(file), "value_head": torch.ones(1, 16)}, file)
    again = engine.pack_of([policy(seed, CRITIC, start=str(file)) for seed in range(2)])
    assert (again.layout.view(again.weights, "value_head") == 1).all()
    plain = engine.pack_of([policy(seed, start=str(file)) for seed in range(2)])
    assert torch.equal(plain.weights[0], pack.weights[0])


@pytest.mark.parametrize(
    ("options", "fields", "reason"),
    [
        ({"critic": True, "baseline": "none"}, {}, "policy.scale=group"),
        ({"critic": True, "scale": "none"}, {}, "policy.baseline=group"),
        ({**CRITIC, "level": "sequence"}, {}, "policy.level=sequence"),
        (CRITIC, {"name": "lamb"}, "policy.critic=true"),
        ({"gae": 0.9}, {}, "policy.gae=0.9"),
        ({"value_clip": None}, {}, "policy.value_clip=null"),
        ({"minibatches": 2}, {}, "policy.minibatches=2"),
        ({"minibatches": 4, "updates": 4}, {"ranks": 2}, "policy.minibatches=4"),
        ({"entropy_step": 0.1}, {}, "policy.entropy_step=0.1"),
        ({"mix_in": 1.0}, {"dropout": 0.1}, "model.dropout=0.1"),
    ],
)
def test_what_does_not_go_together_is_one_line(options: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_trial(policy(0, options, **fields))
    (line,) = error.value.reasons
    assert line.startswith(f"{reason}: ") and "allowed: " in line
