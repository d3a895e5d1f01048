"""What watches a policy, and what a playbook does to one: its penalty, its reference, its sampler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.config.ladder import canonical
from harness.config.trial import Playbook
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS
from harness.testing import engine
from harness.training.config_checks import check_trial
from injectors.value import Value
from tests.harness.test_detectors import options_of
from tests.harness.test_policy import policy

ROWS, STEPS, STRUCK = 4, 300, 200


def answered(action: str, step: int = 2, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A policy on which a playbook acts at one step."""
    ladder = canonical([{"detector": "at_step", "action": action, "limit": 1}])
    own = {"detect": {"name": "at_step"}, "detect.at_step": {"step": step}, "playbook": Playbook("own", ladder)}
    return policy(0, options, **{"steps": 8, **own, **fields})


def penalties(run: engine.Run, number: int = 0) -> np.ndarray:
    return np.asarray(run.signals["penalty"][number])


# --- actions ---------------------------------------------------------------------------------------------------------


def test_a_penalty_is_raised_for_good_and_to_the_least_at_least() -> None:
    own = {"playbook.raise_penalty": {"factor": 3.0, "least": 0.05}}
    run = engine.run([answered("raise_penalty", 2, {"beta": beta}, **own) for beta in (0.1, 0.0)])
    np.testing.assert_allclose(penalties(run, 0), [0.1] * 3 + [0.3] * 5)
    np.testing.assert_allclose(penalties(run, 1), [0.0] * 3 + [0.05] * 5)
    assert [act["detail"] for incident in run.result.incidents[1] for act in incident["acts"]] == [{"beta": 0.05}]


def test_each_alarm_raises_the_penalty_again() -> None:
    ladder = canonical([{"detector": "policy_reward", "action": "raise_penalty", "limit": None}])
    trial = policy(0, {"beta": 0.1}, detect={"name": "policy_reward"}, playbook=Playbook("own", ladder), steps=60)
    run = engine.run([trial], block=60)
    raised = penalties(run)
    alarms = int(run.signals["alarm_policy_reward"][0, :-1].sum())
    assert raised[-1] == pytest.approx(0.1 * 2.0**alarms)


def test_a_reference_that_is_reset_is_the_model_of_that_step() -> None:
    """With one step a rollout: that of the next one is what the model was at the alarm, after its update."""
    run = engine.run([answered("reset_reference", step, {"group": 8}, steps=20, batch=16) for step in (11, 100)])
    moved, kept = run.signals["reference_kl_k3"]
    assert np.array_equal(moved[:12], kept[:12]) and (kept[11:] > 0).all()
    assert moved[12] == 0 and (moved[13:] > 0).all() and (moved[13:] < kept[13:]).all()


def test_a_reset_reference_is_in_checkpoints_and_snapshots(tmp_path: Path) -> None:
    trials = [answered("reset_reference", 2, {"beta": 0.3, "updates": 2}) for _ in range(2)]
    engine.assert_resumes(trials, tmp_path, kills=[2, 3, 5])
    own = {"playbook.roll_back": {"back": 1}, "playbook.snapshot": {"every": 1, "kept": 4}}
    back = engine.run([answered("roll_back+reset_reference", 4, {"beta": 0.3}, **own)])
    (incident,) = back.result.incidents[0]
    assert [act["action"] for act in incident["acts"]] == ["roll_back", "reset_reference"]
    assert back.signals["reference_kl_k3"][0, incident["acts"][0]["to"]] == 0


def test_a_reference_that_is_reset_now_and_then(tmp_path: Path) -> None:
    """After every third rollout; beside a row in which it is the start for longer; the rest follows from it."""
    trials = [policy(0, {"group": 8, "reference_every": n, "updates": 2}, steps=24, batch=16) for n in (3, 100)]
    run = engine.run(trials)
    moved, kept = run.signals["reference_kl_k3"][:, ::2]
    assert (moved[[0, 3, 6, 9]] == 0).all() and (kept[8:] > 0).all() and (moved[[8, 11]] > 0).all()
    assert (moved[9:] < kept[9:]).all()
    engine.assert_resumes(
        [policy(0, {"reference_every": 2, "beta": 0.1, "updates": 2}, steps=9)], tmp_path, kills=[4, 7]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "bf16"},
        {"sampler_noise": 0.5},
        {"sampler_temperature": 1.3},
        {"sampler_lag": 2},
        {"sampler": "fp8", "sampler_noise": 0.1, "sampler_lag": 1, "end": 7},
    ],
    ids=lambda x: "+".join(x),
)
def test_a_sampler_is_matched(options: dict[str, Any], tmp_path: Path) -> None:
    """Apart before the alarm; from the next rollout on the trainer's own, exactly."""
    matched, apart = answered("match_sampler", 3, options), answered("match_sampler", 100, options)
    run = engine.run([matched, apart])
    largest = run.signals["mismatch_max"]
    assert np.array_equal(largest[0, :4], largest[1, :4]) and largest[0, 3] > 0
    assert (largest[0, 4:] == 0).all() and (largest[1, 4:] > 0).all()
    engine.assert_resumes([matched], tmp_path, kills=[3, 5])


def test_a_sampler_that_is_not_apart_is_bitwise_none() -> None:
    """Beside a row whose sampler is."""
    own = {"sampler": "bf16", "sampler_noise": 0.1, "sampler_lag": 2}
    run = engine.run([policy(0, own | {"sampler_apart": False}), policy(0, own)])
    control = engine.run([policy(0), policy(1)])
    assert torch.equal(run.weights[-1][0], control.weights[-1][0]) and (run.signals["mismatch_max"][0] == 0).all()
    assert not torch.equal(run.weights[-1][1], control.weights[-1][0])


@pytest.mark.parametrize(
    ("action", "options", "fields", "words"),
    [
        ("raise_penalty", {}, {}, "raise_penalty: policy.beta=null: there is no penalty; allowed: a number, 0 too"),
        ("match_sampler", {"sampler_apart": False}, {}, "match_sampler: policy.sampler_apart=false: it is the trainer"),
        *(
            (name, {}, {"objective": {"name": "next_token"}}, f"{name}: objective.name=next_token samples nothing")
            for name in ("raise_penalty", "reset_reference", "match_sampler")
        ),
    ],
)
def test_what_cannot_be_done_is_said_before(
    action: str, options: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        check_trial(answered(action, 2, options, **fields))


# --- detectors -------------------------------------------------------------------------------------------------------


def said(name: str, signal: str, given: np.ndarray, **constants: float) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and scores of a detector whose own signal has these values; losses are usual where it is another."""
    signals = {"loss": np.full((ROWS, STEPS), -0.3)} | {signal: given}
    return replay(DETECTORS[name], options_of(name, **constants), signals, np.ones((ROWS, STEPS), bool))


def usual(level: float, spread: float) -> np.ndarray:
    return level + spread * np.random.default_rng(3).standard_normal((ROWS, STEPS))


def test_early_stopping_is_at_one_and_a_half_times_the_target() -> None:
    values = np.zeros((ROWS, STEPS))
    values[0, STRUCK], values[1, STRUCK], values[2, STRUCK] = 0.0149, 0.0151, np.nan
    alarms, scores = said("policy_kl", "step_kl", values)
    assert np.argwhere(alarms).tolist() == [[1, STRUCK]], "what was not read says nothing"
    assert scores[1, STRUCK] == pytest.approx(1.51)


def test_skipped_steps_keep_a_policy_near_its_rollout() -> None:
    """PPO's early stopping: a step that would be too far is not taken, nor those after it on that rollout."""
    ladder = canonical([{"detector": "policy_kl", "action": "skip", "limit": None, "cool_down": 1}])
    far = {"updates": 6, "clip_low": None, "clip_high": None, "group": 8}
    own = {"steps": 30, "lr": 0.03, "batch": 16, "detect": {"name": "policy_kl"}}
    stopped, free = (policy(0, far, playbook=Playbook("own", book), **own) for book in (ladder, "[]"))
    run = engine.run([stopped]), engine.run([free])
    kl = [one.signals["step_kl"][0] for one in run]
    assert kl[1].max() > 0.05 and (kl[0] > 0.015).any()
    for first in (18, 24):
        over = np.flatnonzero(kl[0][first : first + 6] > 0.015)
        assert len(over) and (np.diff(over) == 1).all() and over[-1] == 5
        assert len(set(kl[0][first + over[0] : first + 6])) == 1, "it stands still until the next rollout"


def test_a_policy_whose_variety_goes_at_once_is_seen_and_one_that_learns_is_not() -> None:
    values = usual(3.0, 0.05) * np.linspace(1, 0.3, STEPS)
    assert not said("policy_entropy", "token_entropy", values)[0].any()
    values[1, STRUCK:] *= 0.3
    values[2, -1] = 0.04
    alarms, _ = said("policy_entropy", "token_entropy", values)
    assert alarms[1, STRUCK] and alarms[2, -1] and not alarms[[0, 3]].any()


def test_a_sampler_that_departs_is_seen() -> None:
    values = np.abs(usual(0.01, 0.001))
    values[0, STRUCK], values[1, STRUCK], values[2, 3] = 0.04, 0.06, 1.1
    alarms, _ = said("policy_mismatch", "mismatch_max", values)
    assert np.argwhere(alarms).tolist() == [[1, STRUCK], [2, 3]]
    values = np.zeros((ROWS, STEPS))
    values[0, STRUCK], values[1, STRUCK] = 0.004, 0.006
    assert np.argwhere(said("policy_mismatch", "mismatch_max", values)[0]).tolist() == [[1, STRUCK]]


def test_half_of_what_was_gained_and_lost_again_is_seen() -> None:
    """Not noise around a level, not a policy that never gained, and not one that loses less."""
    steps = np.arange(STEPS)
    lost = 0.8 * np.clip((steps - STRUCK) / 50, 0, 1) * np.array([[1, 0.4, 0, 0]]).T
    values = 0.8 * np.clip(steps / 100, 0, 1) - lost + usual(0.0, 0.03)
    values[3] = usual(0.0, 0.03)[3]
    alarms, scores = said("policy_reward", "quality", values)
    assert not alarms[1:].any() and alarms[0].any() and 215 <= np.flatnonzero(alarms[0])[0] <= 245
    assert np.isnan(scores[:, :20]).all() and (scores[3, 20:] == 0).all()


def test_a_reward_of_the_other_sign_is_an_alarm_of_a_run() -> None:
    """After the policy has learned the task, and none beside it."""
    options, own = {"group": 4}, {"steps": 160, "batch": 16, "lr": 1e-2, "detect": {"name": "policy_reward"}}
    golden = policy(0, options, **own)
    flipped = Value(site="reward", tensor="reward", elements=None, start=36, duration=None, model="scale", value=-1.0)
    run = engine.run([golden, dataclasses.replace(golden, fault=flipped)], block=160)
    alarms = run.signals["alarm_policy_reward"]
    assert not alarms[0].any() and not alarms[1, :37].any() and alarms[1, 37:].any()
    assert run.signals["quality"][1, -1] < 0.2 < 0.6 < run.signals["quality"][0, -1]
