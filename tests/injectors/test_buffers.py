"""Faults of what a model keeps and no gradient trains: a router's biases, and the buffers of a user's model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import analysis
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


def train(
    fault: dict[str, Any] | None, steps: int = 8, is_read: bool = False, **options: Any
) -> tuple[nn.Module, Any, list[float]]:
    """A model with a batch norm, which `is_read` if it is that of evaluation; and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[1].train(not is_read)
    losses = []
    batches = torch.randn(steps, 16, 4, generator=torch.Generator().manual_seed(1))
    with attach(model, optimizer, fault=fault, **options) as run:
        for batch in run.steps(batches):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.observe(loss)
    return model, run, losses


MEAN = {"name": "value", "site": "buffer", "tensor": "1.running_mean", "element": 3, "model": "set", "value": 50.0}


@pytest.mark.parametrize("recover", [None, "repair"])
def test_a_buffer_of_a_users_model(recover: str | None) -> None:
    """The running mean of a batch norm, which training writes and does not read."""
    golden, *_ = train(None)
    struck, run, _ = train({**MEAN, "start": 4}, recover=recover)
    (event,) = run.events
    assert (event.site, event.tensor, event.index, event.step) == ("buffer", "1.running_mean", (3,), 4)
    before, after = golden[1].running_mean, struck[1].running_mean
    assert torch.isclose(after[3] - before[3], torch.tensor((50.0 - float(event.before)) * 0.9**4), rtol=1e-4)
    assert torch.equal(torch.cat([before[:3], before[4:]]), torch.cat([after[:3], after[4:]]))
    assert all(torch.equal(x, y) for x, y in zip(golden.parameters(), struck.parameters(), strict=True))


def test_its_twin_is_the_run_without_it() -> None:
    _, run, losses = train({**MEAN, "start": 4}, is_read=True, twin=True)
    _, _, golden = train(None, is_read=True)
    own, twins = losses[:8], losses[8:]
    assert own[:4] == golden[:4] and own[4] != golden[4] and twins == golden[8 - len(twins) :]
    assert not run.deviation[:4].any() and run.deviation[4:].all()


def test_a_step_that_is_skipped_leaves_what_was_struck() -> None:
    """Memory that was struck stays so, as a weight does: that the loss is not finite undoes nothing."""
    ladder = {"ladder": [{"detector": "any", "action": "skip", "limit": 10}]}
    model, run, losses = train({**MEAN, "model": "nan", "start": 4}, is_read=True, recover=ladder, detect="finite")
    assert [loss == loss for loss in losses] == [True] * 4 + [False] * 4
    assert model[1].running_mean.isnan().tolist() == [False] * 3 + [True] + [False] * 4
    assert all(x.isfinite().all() for x in model.parameters()) and run.incidents


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"tensor": "1.num_batches_tracked"}, "matches no tensor .*allowed: a glob over 1.running_mean, 1.running_var"),
        ({"tensor": "1.weight"}, "matches no tensor .*allowed: a glob over 1.running_mean, 1.running_var"),
        ({"tensor": "*", "element": 8}, "fault.element=8: beyond fault.tensor=.*allowed: 0 to 7"),
    ],
)
def test_only_numbers_that_are_there_can_be_struck(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train({**MEAN, **fault})


class Kept(nn.Module):
    """A model with a buffer."""

    def __init__(self, buffer: torch.Tensor | None):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        if buffer is not None:
            self.register_buffer("kept", buffer)


@pytest.mark.parametrize(
    "buffer",
    [
        None,
        torch.arange(4),
        torch.eye(2).to_sparse(),
        torch.ones(1).expand(4),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_what_cannot_be_struck_is_left_out(buffer: torch.Tensor | None) -> None:
    model = Kept(buffer)
    with pytest.raises(ConfigError, match="fault.site=buffer: this model keeps none; allowed: another site"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1), fault={"name": "value", "site": "buffer"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_bits_are_those_of_its_own_format(dtype: torch.dtype) -> None:
    model = Kept(torch.full((4,), 1.5, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, fault={"name": "value", "site": "buffer", "bit": -1, "start": 1}) as run:
        for batch in run.steps(torch.ones(3, 2)):
            optimizer.zero_grad()
            loss = model.linear(batch).sum()
            loss.backward()
            optimizer.step()
            run.observe(loss)
    parts = torch.view_as_real(model.kept) if dtype.is_complex else model.kept
    assert (parts < 0).sum() + (torch.signbit(parts) & (parts == 0)).sum() == 1, "one sign"


def test_a_campaign_over_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def body(run: Any) -> None:
        for batch in run.steps(torch.randn(6, 16, 4, generator=torch.Generator().manual_seed(1))):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.observe(loss)

    fault = {"name": "value", "site": "buffer", "tensor": "1.running_*", "start": 3}
    told = attach.campaign(body, model, optimizer, fault=fault, samples=3, steps=6, out=tmp_path / "out")
    assert told.faults == 3
    events = analysis.fault_events(tmp_path / "out")
    assert set(events["site"]) == {"buffer"} and set(events["tensor"]) <= {"1.running_mean", "1.running_var"}


def test_of_processes_the_first_gives_its_buffers_to_all(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="fault.rank=1: DistributedDataParallel gives all .*allowed: 0, which"):
            attach(model, optimizer, fault={**MEAN, "rank": 1})
    finally:
        distributed.destroy_process_group()
