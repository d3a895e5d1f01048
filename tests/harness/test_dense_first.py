"""Mixtures of experts whose first blocks are dense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS
from harness.faults.facts import facts_of
from harness.model.branches import branches_of
from harness.testing import engine
from harness.training.config_checks import check_trial
from sweeps.planning.planner import activation_elements
from tests.harness.experts import mixed

FIELDS: dict[str, Any] = {"depth": 3, "steps": 8, "batch": 4, "lr": 0.03, "precision": "fp64"}
WATCHED = {"name": "expert_share+router_logits+expert_output"}
EAGER = {"detect.expert_share": {"least": 1, "persist": 1, "share": 0.3}, "detect.router_logits": {"window": 4}}
EAGER |= {"detect.expert_output": {"window": 4, "growth": 1.01}, "signals": {"expert_outputs": 1}}


def trials(dense_first: int, **fields: Any) -> list[Any]:
    moe = {"dense_first": dense_first, "bias_rate": 0.01}
    return [mixed(moe, **{**FIELDS, "seed": seed, **fields}) for seed in range(2)]


def test_the_first_blocks_are_those_of_a_dense_model() -> None:
    """Names, shapes, start and taps; the others are those of a mixture in all blocks."""
    first, dense, all_mixed = (engine.pack_of(given) for given in (trials(1), dense_trials(), trials(0)))
    for name, tensor in first.layout.by_name.items():
        other = dense if name.startswith("blocks.0.") else all_mixed
        assert tensor == other.layout.by_name[name]
        assert torch.equal(first.layout.view(first.weights, name), other.layout.view(other.weights, name)), name
    assert "blocks.0.feedforward.gate" in first.layout.by_name and "blocks.1.moe.router" in first.layout.by_name
    assert not any(name.startswith("blocks.0.moe") for name in (*first.layout.by_name, *first.model.taps.names))
    assert "blocks.0.feedforward.up" in facts_of(first.planned[0]).taps


def dense_trials() -> list[Any]:
    return [replace_mixer(trial) for trial in trials(0)]


def replace_mixer(trial: Any) -> Any:
    return engine.trial(**{**FIELDS, "width": 16, "context": 8, "activation": "swiglu", "seed": trial.seed})


def test_without_dense_blocks_a_stored_trial_is_the_same() -> None:
    plain = mixed({"bias_rate": 0.01}, **{**FIELDS, "seed": 0})
    assert trials(0)[0].id == plain.id != trials(1)[0].id
    assert "dense_first" not in str(plain.to_dict())


@pytest.mark.parametrize("fields", [{}, {"checkpointing": True}, {"ranks": 2}, {"micro_batches": 2}])
def test_bits_do_not_depend_on_the_pack(fields: dict[str, Any]) -> None:
    given = trials(2, **fields)
    together = engine.run(given)
    for number in range(2):
        engine.assert_same_trials(engine.run([given[number]] * 2), together, {0: number})
    assert np.isfinite(together.signals["loss"]).all()


def test_readings_of_experts_are_those_of_the_blocks_that_have_them() -> None:
    run = engine.run(trials(1, signals={"expert_outputs": 1}))
    for name in ("expert_share", "router_entropy", "router_logit_max", "expert_output_max"):
        values = run.signals[name]
        assert np.isnan(values[:, :, 0]).all() and np.isfinite(values[:, :, 1:]).all(), name
    assert np.isfinite(run.signals["activation_rms"]).all()


def test_detectors_watch_the_blocks_that_have_experts() -> None:
    """Without an alarm for those that have none; the replay says the same, also of rows that lack others."""
    runs = {first: engine.run(trials(first, detect=WATCHED, **EAGER)) for first in (0, 1, 2)}
    for name in WATCHED["name"].split("+"):
        options = trials(0, detect=WATCHED, **EAGER)[0].section(f"detect.{name}")
        watched = [*DETECTORS[name].watches]
        signals = {
            signal: np.concatenate([np.asarray(run.signals[signal], np.float32) for run in runs.values()])
            for signal in watched
        }
        alarms, scores = replay(DETECTORS[name], options, signals, np.isfinite(signals["loss"]))
        on_line = np.concatenate([run.signals[f"alarm_{name}"] for run in runs.values()])
        said = np.concatenate([run.signals[f"score_{name}"] for run in runs.values()])
        np.testing.assert_array_equal(alarms, on_line == 1)
        np.testing.assert_array_equal(scores.astype(np.float32), np.asarray(said, np.float32))
        assert np.isfinite(said).any(), name
    assert (np.concatenate([run.signals["alarm_expert_share"] for run in runs.values()]) == 1).any()


def test_memory_is_counted_block_by_block() -> None:
    counts = [
        activation_elements(trial.model, 64, branches=branches_of(trial)) for trial in (trials(n)[0] for n in (0, 1, 2))
    ]
    assert counts[0] - counts[1] == counts[1] - counts[2] > 0


def test_some_block_has_experts() -> None:
    with pytest.raises(
        ConfigError, match="moe.dense_first=3: none of model.depth=3 blocks has experts; allowed: 0 to 2"
    ):
        check_trial(trials(3)[0])
