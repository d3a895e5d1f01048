"""How many tokens of a fixed batch a step sends to other experts, and the detector that watches it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import ConfigError
from harness.testing import engine
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from tests.harness.experts import TOP, mixed

FIELDS: dict[str, Any] = {"depth": 2, "steps": 6, "batch": 4, "lr": 0.1, "precision": "fp64"}
READ = {"signals": {"routing_probe": 1}}


def trials(**fields: Any) -> list[Any]:
    return [mixed({}, **{**FIELDS, **READ, "seed": seed, **fields}) for seed in range(2)]


def chosen(pack: Pack, weights: Tensor) -> Tensor:
    """The experts of the tokens of step 0, by each layer's router logits: [R, layers, N, K]."""
    logits: dict[str, Tensor] = {}
    detach = pack.model.taps.attach("blocks.*.moe.logits", lambda name, x: logits.update({name: x.clone()}))
    kept = pack.weights.clone()
    pack.weights.copy_(weights)
    with torch.no_grad():
        pack.model(pack.objective.batch(0)[:, :, :-1])
    pack.weights.copy_(kept)
    detach()
    return torch.stack([x.topk(TOP, -1).indices.sort(-1).values for x in logits.values()], 1)


def test_it_is_the_share_of_tokens_whose_experts_change() -> None:
    weights: list[Tensor] = []
    run = engine.run(trials(), prepare=lambda pack: weights.append(pack.weights.clone()))
    every = [weights[0], *(torch.stack([block[r] for r in range(2)]) for block in run.weights)]
    by_hand = [chosen(run.pack, of_step) for of_step in every]
    for step in range(FIELDS["steps"]):
        expected = (by_hand[step] != by_hand[step + 1]).any(-1).double().mean(-1)
        np.testing.assert_allclose(run.signals["probe_flips"][:, step], expected, rtol=1e-6)
    assert (run.signals["probe_flips"] > 0).any()


def test_a_step_that_moves_nothing_sends_no_token_elsewhere() -> None:
    run = engine.run(trials(lr=0.0))
    assert (run.signals["probe_flips"] == 0).all()


@pytest.mark.parametrize("fields", [{}, {"ranks": 2}, {"moe": {"bias_rate": 0.01}}, {"moe": {"lag": 1}}])
def test_who_looks_changes_nothing(fields: dict[str, Any]) -> None:
    moe, rest = fields.get("moe", {}), {name: value for name, value in fields.items() if name != "moe"}
    seen, unseen = (
        engine.run([mixed(moe, **{**FIELDS, **rest, **read, "seed": seed}) for seed in range(2)]) for read in (READ, {})
    )
    for name in ("loss", "grad_norm", "router_entropy"):
        np.testing.assert_array_equal(seen.signals[name], unseen.signals[name])
    assert torch.equal(seen.pack.weights, unseen.pack.weights)


def test_blocks_without_experts_have_none() -> None:
    run = engine.run([mixed({"dense_first": 1}, **{**FIELDS, **READ, "seed": seed}) for seed in range(2)])
    flips = run.signals["probe_flips"]
    assert np.isnan(flips[:, :, 0]).all() and np.isfinite(flips[:, :, 1]).all()


def test_the_detector_hears_a_router_that_is_overwritten() -> None:
    """Its logits reversed at step 12: nearly all tokens go elsewhere then, and it is said one step later."""
    fields = {**FIELDS, **READ, "steps": 16, "lr": 1e-3, "detect": {"name": "routing_flips"}}
    fields |= {"detect.routing_flips": {"window": 6}}

    def strike(pack: Pack) -> None:
        step, steps = pack.step, iter(range(16))

        def stepped(*arguments: Any, **named: Any) -> Any:
            norms = step(*arguments, **named)
            if next(steps) == 12:
                pack.layout.view(pack.weights, "blocks.0.moe.router")[1].neg_()
            return norms

        pack.step = stepped  # type: ignore[method-assign]

    run = engine.run([mixed({}, **{**fields, "seed": seed}) for seed in range(2)], prepare=strike)
    alarms = run.signals["alarm_routing_flips"] == 1
    assert alarms[1].nonzero()[0].tolist() == [13] and not alarms[0].any()
    assert run.signals["probe_flips"][1, 12, 0] > 0.9


def test_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="block.channel_mixer=feedforward has no experts"):
        check_trial(engine.trial(signals={"routing_probe": 1}))
    with pytest.raises(ConfigError, match="signals.routing_probe=0 never reads; allowed: signals.routing_probe >= 1"):
        check_trial(mixed({}, **FIELDS, detect={"name": "routing_flips"}))
