"""Experts by older weights: those of another model that is given these weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config import ConfigError
from harness.config.trial import Playbook
from harness.model.branches import branches_of
from harness.model.routing import GATES, chosen, hashed
from harness.testing import check_setting, engine
from harness.testing.changes import Change, fill_first
from harness.training.activation_counts import idle_parts
from harness.training.config_checks import check_trial
from harness.training.pack import Pack
from harness.training.sites import Site
from sweeps.planning.planner import state_bytes
from tests.harness.experts import EXPERTS, TOP, mixed

STEPS, LAG = 7, 3
LIVE: dict[str, Any] = {"steps": STEPS, "depth": 2, "lr": 0.1, "precision": "fp32", "batch": 4}


@pytest.mark.parametrize(
    "fields",
    [
        {"moe": {"lag": 2}, "checkpointing": True},
        {"moe": {"lag": 1, "stale": "weights", "bias_rate": 0.01}, "ranks": 2, "batch": 4, "micro_batches": 2},
        {"moe": {"routing": "frozen", "frozen_from": 2}},
        {"moe": {"routing": "hash"}},
    ],
    ids=["lag", "weights, bias, ranks", "frozen", "hash"],
)
def test_it_keeps_the_promises_of_settings(fields: dict[str, Any]) -> None:
    check_setting(**{"block": {"channel_mixer": "moe"}, "activation": "swiglu", **fields})


class SeenExperts:
    """The experts that count in each pass of a pack, the weights before each step, and its batches."""

    def __init__(self, pack: Pack):
        self.pack, self.experts, self.weights, self.batches = pack, [], [], []
        learn, routes = pack.learn, pack.model.routes

        def listened(batch: Tensor, *rest: Any, **named: Any) -> Tensor:
            if not named.get("rank", rest[2] if len(rest) > 2 else 0):
                self.weights.append(pack.weights.clone())
            self.batches.append(batch)
            return learn(batch, *rest, **named)

        pack.learn = listened  # type: ignore[method-assign]
        told: Callable[..., Any] = routes.routed  # type: ignore[union-attr]

        def routed(*given: Any) -> Any:
            found = told(*given)
            if torch.is_grad_enabled():
                self.experts.append(found[0].clone())
            return found

        routes.routed = routed  # type: ignore[union-attr, method-assign]


def by_another_model(weights: Tensor, batch: Tensor) -> list[Tensor]:
    """The experts [R, n, K] of each layer that a plain model of these weights chooses for the tokens of a batch."""
    pack, found = engine.pack_of([mixed(**LIVE)] * len(weights)), []
    pack.weights.copy_(weights)

    def choose(name: str, logits: Tensor) -> None:
        found.append(chosen(GATES["softmax"](logits.detach()), TOP))

    pack.model.taps.attach("blocks.*.moe.logits", choose)
    with torch.no_grad():
        pack.model(batch[:, :, :-1])
    return found


def seen_of(moe: dict[str, Any], **fields: Any) -> SeenExperts:
    kept: list[SeenExperts] = []
    trials = [mixed(moe, **{**LIVE, **fields, "seed": seed}) for seed in range(2)]
    engine.run(trials, prepare=lambda pack: kept.append(SeenExperts(pack)))
    return kept[0]


@pytest.mark.parametrize(("ways", "passes"), [({}, 1), ({"ranks": 2, "micro_batches": 2}, 4)])
def test_experts_are_those_that_the_weights_of_so_many_steps_before_choose(ways: dict[str, Any], passes: int) -> None:
    """In the first steps, of which nothing is known, those of the current ones."""
    seen, differ = seen_of({"lag": LAG}, **ways), 0
    per_rank = passes // ways.get("micro_batches", 1)
    for step in range(STEPS):
        ours = torch.stack(seen.experts[2 * passes * step : 2 * passes * (step + 1)])  # layers of a pass, pass by pass
        batches = seen.batches[per_rank * step : per_rank * (step + 1)]
        batch = torch.cat(batches, 1)
        for number, piece in enumerate(batch.chunk(passes, 1)):
            old, now = (by_another_model(seen.weights[of], piece) for of in (max(step - LAG, 0), step))
            for layer in range(2):
                expected = old[layer] if step >= LAG else now[layer]
                assert torch.equal(ours[2 * number + layer], expected), (step, layer)
                differ += int((old[layer] != now[layer]).any())
    assert differ


def test_frozen_experts_are_those_of_the_weights_of_one_step() -> None:
    seen = seen_of({"routing": "frozen", "frozen_from": 2})
    for step in range(STEPS):
        expected = by_another_model(seen.weights[min(step, 2)], seen.batches[step])
        assert all(torch.equal(*pair) for pair in zip(seen.experts[2 * step :], expected, strict=False)), step


@pytest.mark.parametrize("moe", [{"lag": LAG}, {"lag": LAG, "stale": "weights"}, {"routing": "frozen"}])
def test_weights_that_stand_still_choose_as_they_did(moe: dict[str, Any]) -> None:
    """Bit for bit, and the part has then acted at no step."""
    own = {**LIVE, "lr": 0.0}
    stale, live = (engine.run([mixed(options, **own)] * 2) for options in (moe, {}))
    assert torch.equal(stale.weights[-1][0], live.weights[-1][0])
    assert (stale.signals["loss"] == live.signals["loss"]).all()
    assert set(stale.result.acts[0].values()) == {0}
    assert (stale.signals["stale_share"][0, LAG:] == 1).all() and not stale.signals["stale_differs"].any()


def test_a_lag_that_nobody_asks_for_changes_no_bit() -> None:
    asked, live = (engine.run([mixed(moe, **LIVE)] * 2) for moe in ({"lag": LAG, "stale_when": "asked"}, {}))
    assert torch.equal(asked.weights[-1][0], live.weights[-1][0])
    assert not asked.signals["stale_share"].any()
    always = engine.run([mixed({"lag": LAG}, **LIVE)] * 2)
    assert not torch.equal(always.weights[-1][0], live.weights[-1][0])
    assert always.result.acts[0]["moe.lag"] == np.count_nonzero(always.signals["stale_differs"][0].any(-1)) > 0
    assert (always.signals["stale_share"][0].max(-1) == [0] * LAG + [1] * (STEPS - LAG)).all()


def test_old_weights_are_those_that_the_experts_had() -> None:
    """Then no gradient of the loss reaches the router."""
    for kept in ("choice", "weights"):
        pack = engine.run([mixed({"lag": 1, "stale": kept, "balance": 0.0}, **LIVE)] * 2).pack
        assert bool(pack.layout.view(pack.gradients, "blocks.0.moe.router").any()) is (kept == "choice")


def test_text_that_was_not_looked_at_goes_by_current_weights() -> None:
    """A batch that a fault has changed after it was looked at, and those after batches were skipped."""
    spoilt = Change(Site.BATCH, range(5, 6), lambda tensors: tensors["batch"].view(-1)[:1].add_(1).remainder_(2))
    run = engine.run([mixed({"lag": 2}, **LIVE)] * 2, {1: spoilt})
    share = run.signals["stale_share"][:, :, 0]
    assert share[0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert share[1].tolist() == [0, 0, 1, 1, 1, 0.75, 1]


def test_hashed_experts_follow_from_the_token_and_the_layer_alone() -> None:
    """In validation too; each token has experts of its own, all of them different, and all are used."""
    tables = [hashed(64, EXPERTS, TOP, layer, torch.device("cpu")) for layer in range(2)]
    assert tables[0].shape == (64, TOP) and not torch.equal(*tables)
    assert (tables[0][:, 0] != tables[0][:, 1]).all() and len(tables[0].unique()) == EXPERTS
    pack = engine.pack_of([mixed({"routing": "hash"}, **LIVE)] * 2)
    batch, loads = pack.batch(0), []
    pack.model.taps.attach("blocks.1.moe.loads", lambda name, x: loads.append(x.detach()))
    for _ in range(2):
        with torch.no_grad():
            pack.model(batch[:, :, :-1])
        pack.weights.normal_()
    assert torch.equal(*loads)
    experts = tables[1][batch[0, :, :-1].flatten()].flatten()
    assert torch.equal(torch.bincount(experts, minlength=EXPERTS) / batch[0, :, :-1].numel(), loads[0][0])


def playbook(action: str, **options: Any) -> dict[str, Any]:
    ladder = f'[{{"detector": "at_step", "action": "{action}", "limit": 1, "cool_down": 20}}]'
    return {"playbook": Playbook("own", ladder), **options}


def test_a_playbook_asks_for_it_for_some_steps() -> None:
    """The trial goes back, is routed by older weights for so many steps, and goes on as usual."""
    own = {**LIVE, "steps": 14, "detect": {"name": "at_step"}, "detect.at_step": {"step": 6}}
    own |= playbook(
        "roll_back+anticipate",
        **{"playbook.roll_back": {"back": 1}, "playbook.anticipate": {"steps": 4}, "playbook.snapshot": {"every": 1}},
    )
    run = engine.run([mixed({"lag": 2, "stale_when": "asked"}, **own)] * 2, block=20)
    (incident,) = run.result.incidents[0]
    assert [(act["action"], act["to"]) for act in incident["acts"]] == [("roll_back", 5), ("anticipate", None)]
    share = run.signals["stale_share"][0, :, 0]
    assert np.flatnonzero(share).tolist() == [5, 6, 7, 8] and (share[5:9] == 1).all()


@pytest.mark.parametrize(
    ("moe", "fields", "idle"),
    [
        ({"lag": LAG, "stale_when": "asked"}, {}, ["moe.lag"]),
        ({"lag": LAG, "stale_when": "asked"}, playbook("anticipate"), []),
        ({"lag": STEPS}, {}, ["moe.lag"]),
        ({"lag": STEPS - 1}, {}, []),
        ({"routing": "frozen", "frozen_from": STEPS - 1}, {}, ["moe.routing"]),
        ({"routing": "frozen", "frozen_from": STEPS - 2}, {}, []),
    ],
)
def test_what_cannot_act_is_known(moe: dict[str, Any], fields: dict[str, Any], idle: list[str]) -> None:
    assert [key for key in idle_parts(mixed(moe, **LIVE, **fields)) if key.startswith("moe.")] == idle


def test_a_step_that_is_taken_again_is_the_same() -> None:
    """Its experts are still there, bit for bit."""
    own = {**LIVE, "detect": {"name": "finite"}} | playbook("re_execute", **{"playbook.snapshot": {"every": 2}})
    own["playbook"] = Playbook("own", '[{"detector": "any", "action": "re_execute", "limit": 1, "cool_down": 0}]')
    trial = mixed({"lag": 2}, **own)
    ruin = Change(Site.REDUCED_GRADIENT, range(5, 6), fill_first("embedding", np.nan))
    run = engine.run([trial] * 2, {1: ruin}, block=20)
    assert run.result.incidents[1]
    assert torch.equal(run.weights[-1][0], run.weights[-1][1])


@pytest.mark.parametrize("moe", [{"lag": 5}, {"lag": 2, "stale": "weights"}, {"routing": "frozen"}, {}])
def test_memory_of_what_waits_is_counted(moe: dict[str, Any]) -> None:
    """That of a row's state, and of what stands beside it for a step."""
    trial = mixed(moe, **LIVE)
    pack = engine.pack_of([trial] * 2)
    names = ("experts_ahead", "expert_weights_ahead", "frozen_weights")
    held = sum(values[0].nbytes for name, values in pack.rows_state if name in names)
    (branch,) = (one for one in branches_of(trial) if one.kind == "moe")
    counted = branch.state_bytes(trial, pack.weights[0].nbytes)
    routes = pack.stale_routing
    beside = [] if routes is None else [routes._now, routes._seen, routes._weights_now, routes._weights_seen]
    assert counted == pytest.approx(held + sum(x[0].nbytes for x in beside if x is not None), rel=0.01)
    assert state_bytes(trial) - counted == state_bytes(mixed({}, **LIVE))
    assert (counted > 0) is bool(moe)


@pytest.mark.parametrize(
    ("moe", "fields", "said"),
    [
        ({"lag": 2, "routing": "hash"}, {}, "moe.lag=2: moe.routing=hash has no older choice; allowed: 0"),
        ({"lag": 2}, {"sequence_start": 4}, "moe.lag=2: batches of one size are looked at, and schedule.batch_start"),
        ({"routing": "frozen"}, {"batch_start": 1}, "moe.routing=frozen: batches of one size are looked at"),
        ({"stale_when": "asked"}, {}, "moe.stale_when=asked: there is no moe.lag; allowed: always, or a lag above 0"),
        ({"stale": "weights"}, {}, "moe.stale=weights: there is no moe.lag; allowed: choice, or a lag above 0"),
        (
            {"routing": "frozen", "bias_rate": 0.1},
            {},
            "moe.bias_rate=0.1: moe.routing=frozen is to choose by nothing that",
        ),
        ({"frozen_from": 2}, {}, "moe.frozen_from=2: moe.routing=live; allowed: 0, or moe.routing=frozen"),
        ({"routing": "frozen", "frozen_from": 99}, {}, "moe.frozen_from=99: beyond the run; allowed: 0 to "),
        (
            {},
            playbook("anticipate"),
            "playbook: anticipate: moe.lag=0: no older weights choose; allowed: moe.lag=1 to 64",
        ),
        ({"lag": 2}, playbook("anticipate"), "playbook: anticipate: moe.stale_when=always: they choose already"),
    ],
)
def test_what_is_refused(moe: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_trial(mixed(moe, **fields))
    assert any(reason.startswith(said) for reason in refused.value.reasons), refused.value.reasons
