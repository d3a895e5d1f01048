"""Experts of a rollout, replayed in training: the control to the bit, whose experts are whose, and promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.testing import check_setting, engine
from harness.training.config_checks import check_trial
from tests.harness.test_policy import ends, policy, rollouts_of

MOE: dict[str, Any] = {"block": {"channel_mixer": "moe"}, "moe": {"experts": 4, "top": 2}}
ALL: dict[str, Any] = {"routing_replay": True, "sampler_noise": 0.5, "sampler": "bf16", "mix_in": 0.5}
ALL |= {"updates": 2, "minibatches": 2}


def test_without_a_mismatch_a_replay_is_bitwise_the_control() -> None:
    control, found = (
        engine.run([policy(seed, {"routing_replay": replay}, **MOE) for seed in range(2)]) for replay in (False, True)
    )
    for number in range(2):
        assert all(torch.equal(*pair) for pair in zip(ends(control, number), ends(found, number), strict=True))
    assert (found.signals["routing_flips"] == 0).all()


def test_flips_are_seen_with_and_without_a_replay() -> None:
    """A sampler in a narrow format sends some tokens elsewhere; the first ratio is 1 though the trainer follows it."""
    free, held = (
        engine.run([policy(s, {"routing_replay": r, "sampler": "fp8"}, **MOE) for s in range(2)]) for r in (False, True)
    )
    for run in (free, held):
        flips = run.signals["routing_flips"]
        assert flips.shape == (2, 6, 2) and (flips >= 0).all() and (flips <= 1).all() and flips.any()
        assert (run.signals["ratio_max"] == 1).all()
    assert (free.signals["routing_flips"][:, 0] == held.signals["routing_flips"][:, 0]).all()
    assert not torch.equal(free.weights[-1][0], held.weights[-1][0])
    tops = (held.signals["mismatch_max"][:, 0] != free.signals["mismatch_max"][:, 0]).any()
    assert tops == (held.signals["routing_flips"][:, 0] > 0).any()


def test_experts_of_a_training_pass_are_those_of_the_rollout() -> None:
    """Of completions in their minibatch; text behind them goes by the current weights."""
    pack = engine.run([policy(seed, ALL, **MOE) for seed in range(2)]).pack
    routes, seen = rollouts_of(pack).routes, {}
    assert routes is not None
    tokens = pack.objective.rolled_out(torch.empty(0))

    def keep(name: str, x: torch.Tensor) -> None:
        seen[name] = x.clone()

    pack.model.taps.attach("blocks.1.moe.experts", keep)
    pack.learn(tokens)
    (found,) = seen.values()
    every = dict(pack.rows_state)["rollout_experts"][:, 1].long().unflatten(1, (4, 11))
    index = pack.objective._minibatches.index()  # type: ignore[attr-defined]
    expected = torch.stack([every[row, index[row]] for row in range(2)])
    assert torch.equal(found[:, : 2 * 11], expected.flatten(1, 2))
    assert found.shape == (2, 4 * 11, 2)


def test_a_replay_keeps_the_promises_of_settings() -> None:
    of = {"reward": "copy", "group": 2, **ALL}
    check_setting(objective={"name": "policy"}, batch=4, ranks=2, policy=of, **MOE)


def test_a_replay_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    engine.assert_resumes([policy(seed, {**ALL, "updates": 4}, **MOE) for seed in range(2)], tmp_path, kills=[2, 5])


def test_without_experts_a_replay_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^policy.routing_replay=true: block.channel_mixer=feedforward has no"):
        check_trial(policy(0, {"routing_replay": True}))
    assert np.isfinite(engine.run([policy(s, {"routing_replay": True}, **MOE) for s in range(2)]).signals["loss"]).all()
