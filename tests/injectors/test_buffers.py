"""Faults of what a model keeps and no gradient trains: a router's biases, and the buffers of a user's model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import ConfigError, attach
from harness.faults.facts import facts_of
from harness.testing import engine
from harness.testing.faults import START as PROMISED_START
from harness.testing.faults import FaultPromises
from harness.training.pack import Pack
from injectors.realistic import RealisticSDC
from injectors.value import Value
from tests.harness.experts import EXPERTS, TOP, mixed

START, STEPS = 3, 6
BALANCED = {"experts": EXPERTS, "top": TOP, "bias_rate": 0.01}
MOE: dict[str, Any] = {"block": {"channel_mixer": "moe"}, "activation": "swiglu", "moe": BALANCED}
FIELDS: dict[str, Any] = {"depth": 2, "steps": STEPS, "batch": 4, "lr": 0.03, "precision": "fp32", "seed": 5}
FAULTS = {
    "flipped": Value(site="buffer", bit=30, format="fp32"),
    "noisy": Value(site="buffer", model="noise", value=1.0, elements=None),
    "realistic": RealisticSDC(site="buffer", format="fp32"),
}
PROMISES = FaultPromises(list(FAULTS), lambda name: replace(FAULTS[name], start=PROMISED_START, duration=1), MOE)


@pytest.mark.parametrize("promise", FaultPromises.names())
@pytest.mark.parametrize("name", FAULTS)
def test_each_promise(name: str, promise: str) -> None:
    PROMISES.check(promise, name)


def test_a_bias_that_is_wrong_sends_tokens_elsewhere_from_that_step_on() -> None:
    """To the expert with a bias beyond all scores, and in its layer alone; it comes back by its rate a step."""
    set_bias = Value(start=START, duration=1, site="buffer", layer=1, element=2, model="set", value=100.0)
    kept: list[dict[int, list[Tensor]]] = []

    def prepare(pack: Pack) -> None:
        chosen: dict[int, list[Tensor]] = {0: [], 1: []}
        pack.model.taps.attach(
            "blocks.*.moe.experts", lambda name, x: chosen[int(name.split(".")[1])].append(x.clone())
        )
        kept.append(chosen)

    trials = [mixed({"bias_rate": 0.01}, **FIELDS, fault=fault) for fault in (engine.trial().fault, set_bias)]
    run, chosen = engine.run(trials, prepare=prepare), kept[0]
    for step in range(STEPS):
        (first, second), (golden, struck) = chosen[0][step], chosen[1][step]
        if step < START:
            assert torch.equal(first, second) and torch.equal(golden, struck)
        else:
            assert (struck == 2).any(-1).all() and not (golden == 2).any(-1).all()
        if step == START:
            assert torch.equal(first, second), "what stands before the struck layer is as it was"
    (event,) = run.result.events[1]
    assert (event.site, event.tensor, event.index) == ("buffer", "blocks.1.moe.correction_bias", (2,))
    bias = dict(run.pack.rows_state)["router_bias"][1, 1, 2]
    assert 100 - 0.01 * (STEPS - START) - 1e-4 < float(bias) < 100, "moved by its rate in each step since"
    assert run.result.outcome[1] == "trained"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "fault.site=buffer: this model keeps none; allowed: another site, or moe.bias_rate above 0"),
        (MOE | {"moe": BALANCED | {"bias_rate": 0.0}}, "fault.site=buffer: this model keeps none"),
        (MOE, "fault.tensor=blocks.0.*: matches no tensor .*allowed: a glob over blocks.1.moe.correction_bias"),
    ],
)
def test_where_there_is_none_it_is_refused(fields: dict[str, Any], words: str) -> None:
    dense_first = {"moe": {**fields["moe"], "dense_first": 1}} if fields else {}
    with pytest.raises(ConfigError, match=words):
        Value(site="buffer", tensor="blocks.0.*").check(facts_of(engine.trial(depth=2, **{**fields, **dense_first})))


# --- of a user's model -----------------------------------------------------------------------------------------------


def normed() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(fault: dict[str, Any] | None, steps: int = 8, **options: Any) -> tuple[nn.Module, Any]:
    model, optimizer = normed()
    batches = torch.randn(steps, 16, 4, generator=torch.Generator().manual_seed(1))
    with attach(model, optimizer, fault=fault, **options) as run:
        for batch in run.steps(batches):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.observe(loss)
    return model, run


@pytest.mark.parametrize("recover", [None, "repair"])
def test_a_buffer_of_a_users_model(recover: str | None) -> None:
    """The running mean of a batch norm, which training writes and does not read; evaluation reads it."""
    fault = {"name": "value", "site": "buffer", "tensor": "1.running_mean", "element": 3, "model": "set", "value": 50.0}
    golden, _ = train(None)
    struck, run = train({**fault, "start": 4}, recover=recover)
    (event,) = run.events
    assert (event.site, event.tensor, event.index, event.step) == ("buffer", "1.running_mean", (3,), 4)
    before, after = golden[1].running_mean, struck[1].running_mean
    assert torch.isclose(after[3] - before[3], torch.tensor((50.0 - float(event.before)) * 0.9**4), rtol=1e-4)
    assert torch.equal(torch.cat([before[:3], before[4:]]), torch.cat([after[:3], after[4:]]))
    assert all(torch.equal(x, y) for x, y in zip(golden.parameters(), struck.parameters(), strict=True))


def test_its_twin_is_the_run_without_it() -> None:
    model, run = train({"name": "value", "site": "buffer", "tensor": "*var", "bit": 29, "start": 4}, twin=True)
    golden, _ = train(None)
    assert run.events[0].tensor == "1.running_var" and not torch.equal(golden[1].running_var, model[1].running_var)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"tensor": "1.num_batches_tracked"}, "matches no tensor .*allowed: a glob over 1.running_mean, 1.running_var"),
        ({"tensor": "1.weight"}, "matches no tensor .*allowed: a glob over 1.running_mean, 1.running_var"),
        ({"element": 8}, "fault.element=8: beyond fault.tensor=.*allowed: 0 to 7"),
    ],
)
def test_only_numbers_that_are_there_can_be_struck(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train({"name": "value", "site": "buffer", **fault})


def test_a_model_without_any() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="fault.site=buffer: this model keeps none; allowed: another site"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), fault={"name": "value", "site": "buffer"})
