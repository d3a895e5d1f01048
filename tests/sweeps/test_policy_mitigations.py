"""Mitigations of policies: each trained in real packs, without strength the recipe, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config import ConfigError, Trial, shown
from harness.testing import engine
from sweeps.compose.folders import read
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.places import stems
from tests.sweeps import command

ABOUT = {
    name: read(FOLDER, "mitigation", name).about
    for name in stems(FOLDER / "mitigation")
    if name not in ("none", *command.general_mitigations())
}
SMALL: dict[str, Any] = {"objective.name": "policy", "policy.reward": "count", "policy.count.token": 3}
SMALL |= {"policy.group": 4, "policy.updates": 2, "policy.prompt": 3, "train.batch": 8, "train.steps": 6}
SMALL |= {"model.width": 16, "model.depth": 2, "model.head_dim": 8, "model.context": 11, "optim.lr": 1e-2}
SMALL |= {"data.source": "zipf", "data.vocabulary": 32, "data.length": 20_000, "schedule.warmup": 1}
SMALL |= {"train.validate_tokens": 64, "train.validate_between": 64, "train.validate_every": 6}


def trial(mitigation: str, seed: int = 0, fields: Mapping[str, Any] | None = None, **others: Any) -> Trial:
    given = {**SMALL, "seed": seed, **(fields or {}), **others}
    given |= {"block.channel_mixer": "moe"} if mitigation == "routing_replay" else {}
    words = [f"{key}={shown(value)}" for key, value in given.items()]
    return command.composer().trial([f"mitigation={mitigation}", *words])


def test_there_are_mitigations_of_policies() -> None:
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "ppo", "dual_clip", "ptx"} <= set(ABOUT)


@pytest.mark.parametrize("name", ABOUT)
def test_it_trains_and_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """In a pack, alone in a smaller one, and killed between two steps on a rollout."""
    trials = [trial(name, seed) for seed in range(3)]
    run, fewer = engine.run(trials), engine.run(trials[1:])
    assert np.isfinite(run.signals["loss"]).all() and np.isfinite(run.signals["surrogate_loss"]).all()
    engine.assert_same_trials(fewer, run, {0: 1, 1: 2})
    engine.assert_same_end(engine.resumed(trials, tmp_path, [3]), run)
    is_neutral = name in ("truncated_weights", "sequence_mask", "dual_clip", "adaptive_entropy", "routing_replay")
    plain = run if is_neutral else engine.run([trial("none", seed) for seed in range(2)])  # in so few steps
    assert is_neutral or not np.array_equal(run.weights[-1][0], plain.weights[-1][0])


@pytest.mark.parametrize("name", [name for name, about in ABOUT.items() if about.neutral])
def test_without_strength_it_is_the_recipe(name: str) -> None:
    ours, weak = (engine.run([trial("none", seed, fields) for seed in range(2)]) for fields in ({}, _neutral(name)))
    for number in range(2):
        left, right = ours[number], weak[number]
        assert engine.same_bits(left, {key: right[key] for key in left}) == []


def _neutral(name: str) -> dict[str, Any]:
    """All that it sets, with the values without strength."""
    fields = {f"policy.{key}": value for key, value in read(FOLDER, "mitigation", name).fields["policy"].items()}
    return fields | dict(ABOUT[name].neutral)


@pytest.mark.parametrize("name", ABOUT)
def test_it_is_refused_in_one_line_where_nothing_is_sampled(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        command.composer().trial([f"mitigation={name}"])
    (line,) = error.value.reasons
    assert line.startswith(f"mitigation={name}: policy.") and "objective.name=next_token has no such field" in line
    assert line.endswith("; allowed: objective.name=policy, or another mitigation")


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_recipes_of_policies_train(recipe: str) -> None:
    small = {key: value for key, value in SMALL.items() if key.split(".")[0] not in ("objective", "optim")}
    small = {key: value for key, value in small.items() if key not in ("policy.group", "policy.updates")}
    words = [f"{key}={shown(value)}" for key, value in small.items()]
    trials = [command.composer().trial([f"recipe={recipe}", f"seed={seed}", *words]) for seed in range(2)]
    run = engine.run(trials)
    assert trials[0].objective.name == "policy" and np.isfinite(run.signals["surrogate_loss"]).all()
    assert ("value_loss" in run.signals) == (recipe == "ppo")
