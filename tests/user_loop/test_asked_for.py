"""What users of such tools ask for: alarms alone in two lines, a call at an alarm, runs that are resumed."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis import open_sweep
from harness import ConfigError, attach
from tests.user_loop.loops import seeded
from tests.user_loop.scripts import STEPS, data, loss_of, net

# --- alarms alone ------------------------------------------------------------------------------------------------


def orders(observe: Any, order: str, spike: int = -1, accumulate: int = 1) -> nn.Module:
    """A loop that tells its losses with `observe`, before the backward pass, between, or after the update."""
    seeded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    observe = observe(model, optimizer)
    for number, batch in enumerate(data(accumulate * STEPS)):
        loss = loss_of(model, batch) * (1e6 if number == spike else 1)
        if order == "first":
            observe(loss)
        loss.backward()
        if order == "between":
            observe(loss)
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        if order == "last":
            observe(loss)
    return model


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_step_that_was_named_before_is_an_alarm(is_asked: bool) -> None:
    """Also where detectors judge some steps together, and where the loss is told after the update."""
    seeded()
    model, told = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    named = {"name": "at_step", "at_step": {"step": STEPS}}
    on_alarm = (lambda alarm: told.append(alarm.step)) if is_asked else None
    with attach(model, optimizer, on_alarm=on_alarm, detect=named) as run:
        for batch in run.steps(data(2 * STEPS)):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.observe(loss)
    assert np.flatnonzero(run.signals["alarm_at_step"]).tolist() == [STEPS]
    assert told == [STEPS] * is_asked


@pytest.mark.parametrize("looks", [set(), {1, 5, 6, 21}, set(range(1, 2 * STEPS))])
def test_detectors_say_the_same_whenever_they_are_asked(looks: set[int]) -> None:
    """At once where somebody waits for alarms, else some steps together, and at the latest when signals are read."""

    def signals(on_alarm: Any) -> tuple[dict[str, np.ndarray], list[Any]]:
        seeded()
        model, seen = net(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with attach(model, optimizer, on_alarm=on_alarm, detect="combined+skip_step+finite") as run:
            for number, batch in enumerate(run.steps(data(2 * STEPS))):
                loss = loss_of(model, batch) * (1e6 if number == STEPS else 1)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if number == STEPS + 3:
                    optimizer.load_state_dict(optimizer.state_dict())  # detectors begin anew
                run.observe(loss)
                if number in looks:
                    seen.append(run.signals["alarm_combined"])
        return run.signals, seen

    told: list[int] = []
    at_once, _ = signals(lambda alarm: told.append(alarm.step))
    later, seen = signals(None)
    assert at_once.keys() == later.keys() and "score_combined" in later
    assert all(values.tobytes() == later[name].tobytes() for name, values in at_once.items())
    assert all(part.tobytes() == later["alarm_combined"][: len(part)].tobytes() for part in seen)
    raised = np.flatnonzero(
        np.any([later[f"alarm_{name}"] > 0 for name in ("combined", "skip_step", "finite")], axis=0)
    )
    assert STEPS in told and told == list(raised)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("order", ["first", "between", "last"])
def test_alarms_alone_need_two_lines(order: str, accumulate: int) -> None:
    """Each step has the loss and the gradient that it has in a loop over `run.steps`, and nothing is changed."""
    runs: list[Any] = []
    alarms: list[int] = []

    def two_lines(model: nn.Module, optimizer: Any) -> Any:
        run = attach(model, optimizer, on_alarm=lambda alarm: alarms.append(alarm.step))
        runs.append(run)
        return run.observe

    spike = 9 * accumulate
    model = orders(two_lines, order, spike, accumulate)
    runs[0].close()
    bare = orders(lambda *_: lambda loss: None, order, spike, accumulate)
    assert all(map(torch.equal, model.parameters(), bare.parameters()))

    seeded()
    model, losses, norms = net(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, batch in enumerate(data(accumulate * STEPS)):
        loss = loss_of(model, batch) * (1e6 if number == spike else 1)
        losses.append(loss.item())
        loss.backward()
        if number % accumulate == accumulate - 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e30).item())
            optimizer.step()
            optimizer.zero_grad()
    signals = runs[0].signals
    assert np.allclose(signals["grad_norm"], norms, rtol=1e-5)
    assert np.allclose(signals["loss"], np.reshape(losses, (STEPS, accumulate)).mean(1), rtol=1e-6)
    assert alarms and alarms[0] == 9 and runs[0].outcome == "trained"


def test_a_loop_that_is_watched_with_two_optimizers_and_a_scaler() -> None:
    for make in (two_that_step, one_that_is_scaled):
        seeded()
        model, optimizers, extra, step = make()
        before = [weight.detach().clone() for weight in model.parameters()]
        run = attach(model, optimizers, extra)
        for batch in data(STEPS):
            run.observe(step(batch))
        run.close()
        assert len(run.signals["loss"]) == STEPS and run.signals["update_rms"].any()
        assert not all(map(torch.equal, before, model.parameters()))


def two_that_step() -> tuple[Any, ...]:
    model = net()
    optimizers = [torch.optim.SGD([model[0].weight], lr=0.1), torch.optim.Adam(model[3].parameters(), lr=1e-2)]

    def step(batch: Any) -> Tensor:
        model.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return model, optimizers, [], step


def one_that_is_scaled() -> tuple[Any, ...]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=5)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return model, optimizer, [scaler], step


@pytest.mark.parametrize("options", [{"fault": "weight_bit"}, {"recover": "repair"}, {"twin": True}])
def test_what_needs_the_batches_is_refused_there(options: dict[str, Any]) -> None:
    model = net()
    run = attach(model, torch.optim.AdamW(model.parameters()), **options)
    with pytest.raises(ConfigError, match="run.observe: was called outside of run.steps, and fault, recover, twin"):
        run.observe(1.0)


def test_a_watched_run_is_longer_than_anyone_has_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attach(model, optimizer, out=tmp_path)
    for number in range(1203):
        loss = F.mse_loss(model(torch.full((3, 2), 0.1 * (number % 7))), torch.ones(3, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.observe(loss)
    run.close()
    sweep = open_sweep(tmp_path)
    assert sweep.sizes == {**sweep.sizes, "trial": 1, "step": 1203} and sweep["loss"].notnull().all()


# --- results of incidents alone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recover", [None, "repair"])
def test_nothing_is_written_of_a_run_without_alarms(recover: str | None, tmp_path: Path) -> None:
    def train(out: Path, **options: Any) -> Any:
        seeded()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with attach(model, optimizer, out=out, keep="alarms", recover=recover, **options) as run:
            for batch in run.steps(data(STEPS)):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                run.observe(loss)
        return run

    train(tmp_path / "healthy")
    assert not (tmp_path / "healthy").exists()
    run = train(tmp_path / "struck", fault={"name": "weight_bit", "start": 9, "bit": -2})
    sweep = open_sweep(tmp_path / "struck")
    assert np.array_equal(sweep["loss"].values[0], run.signals["loss"], equal_nan=True)
    assert (run.signals["alarm_combined"].any() or run.incidents) and sweep.sizes["step"] == STEPS
    with pytest.raises(ConfigError, match="keep=often: no choice; allowed: all, alarms"):
        attach(net(), torch.optim.SGD(net().parameters(), 1), keep="often")


# --- resumed runs ------------------------------------------------------------------------------------------------


def in_two_processes(cut: int | None, out: Path | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """Train to the end, or to `cut`, and the rest with another model that has loaded what was saved."""
    batches, saved = data(STEPS), io.BytesIO()

    def train(first: int, stop: int) -> tuple[nn.Module, Any]:
        seeded()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        there = torch.load(io.BytesIO(saved.getvalue()), weights_only=False) if first else None
        if there:
            model.load_state_dict(there["model"])
            optimizer.load_state_dict(there["optimizer"])
            torch.set_rng_state(there["random"])
        run = attach(model, optimizer, steps=STEPS, out=out if stop == STEPS else None, **options)
        if there:
            run.load_state_dict(there["run"])
        for batch in run.steps(batches[first:]):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)
            if run.step == stop - 1 < STEPS - 1:
                state = {"run": run.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "random": torch.get_rng_state()}, saved)
                break
        if stop == STEPS:
            run.close()
        return model, run

    if cut is not None:
        train(0, cut)
    return train(cut or 0, STEPS)


@pytest.mark.filterwarnings("ignore:attach")
@pytest.mark.parametrize(
    "fault",
    [
        None,
        {"name": "weight_bit", "start": 4, "bit": 26},
        {"name": "weight_bit", "start": 11, "bit": 26},
        {"name": "activation_bit", "start": 11, "bit": 29},
        {"name": "moment_bit", "start": 12, "bit": 29},
    ],
    ids=lambda fault: "none" if fault is None else f"{fault['name']} at {fault['start']}",
)
def test_a_resumed_run_is_the_whole_run(fault: Any, tmp_path: Path) -> None:
    """Weights, signals, alarms and records of the fault, bit for bit, and what is stored of it."""
    detect = "combined+finite+spike_score+update_norm"
    whole, run = in_two_processes(None, fault=fault, detect=detect, twin=False)
    resumed, other = in_two_processes(8, tmp_path, fault=fault, detect=detect, twin=False)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert run.events == other.events and len(run.events) == (fault is not None)
    assert run.signals.keys() == other.signals.keys()
    for name, values in run.signals.items():
        assert values.tobytes() == other.signals[name].tobytes(), name
    assert open_sweep(tmp_path)["loss"].values[0].tobytes() == run.signals["loss"].tobytes()


@pytest.mark.filterwarnings("ignore:attach")
def test_a_resumed_run_recovers(tmp_path: Path) -> None:
    fault = {"name": "weight_bit", "start": 12, "bit": 30}
    clean, _ = in_two_processes(None, recover="repair")
    resumed, run = in_two_processes(8, fault=fault, recover="repair", twin=False)
    assert len(run.incidents) == 1 and all(map(torch.equal, clean.parameters(), resumed.parameters()))


def test_a_state_of_another_run_is_refused() -> None:
    def run_of(**options: Any) -> Any:
        model = net()
        return attach(model, torch.optim.AdamW(model.parameters()), **options)

    with pytest.raises(ConfigError, match="run.load_state_dict: no state of a run; allowed: what run.state_dict"):
        run_of().load_state_dict({"step": 3})
    with pytest.raises(ConfigError, match="twin=true: a resumed run has no first step; allowed: twin=False"):
        run_of(twin=True).load_state_dict({})
    with pytest.raises(
        ConfigError, match="run.state_dict: .* the step at hand is not over; allowed: after run.observe"
    ):
        run_of().state_dict()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with attach(model, optimizer, steps=2) as run:
        for batch in run.steps(data(2)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)
            state = copy.deepcopy(run.state_dict())
    with pytest.raises(ConfigError, match=r"the state has detectors \['combined', 'finite'\], and this run has \[\]"):
        run_of(detect=None).load_state_dict(state)
    with pytest.raises(ConfigError, match="the state has faults .*, and this run has .'weight_bit'"):
        run_of(fault="weight_bit").load_state_dict(state)
