"""Loops of many forms, each by the promises that `attach` makes: what holds for whom, or the words of a refusal."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis import alarms, open_sweep
from harness import ConfigError, attach
from tests.user_loop.loops import Loop, same
from tests.user_loop.scripts import SCRIPTS, STEPS, Bare, Script
from tests.user_loop.test_attach import traces

STRUCK = 8
SLIGHT = 1e-3, 5e-2  # nat: a last bit of float32, and of bfloat16
PLACE = {  # a weight that is trained at that step, by script; elsewhere that of `net`
    "alternating": "generator.0.weight",
    "frozen": "4.weight",
    "sparse": "table.weight",
    "tied": "table.weight",
    "hidden_state": "lstm.weight_hh_l0",
    "accelerated": "0.weight",
}
CLIPPED = ["plain", "short_tail", "short_windows", "scaled", "prefetched", "hidden_state", "compiled", "accelerated"]
REFUSED = {  # what does not hold for a loop, and the words in which that is said
    ("early_break", "twin"): r"twin=true: the loop ended after 16 of 19 steps, so its twin was not trained; allowed: "
    r"steps=16, or run\.twin\(\) after the run",
    ("early_break", "campaign"): "campaign: the body returned before its loop was over; allowed: a body that goes",
}


def trained(name: str, **options: Any) -> tuple[Script, Any]:
    script = SCRIPTS[name]()
    if script.steps is not None:
        options.setdefault("steps", script.steps)
    with attach(script.model, script.optimizers, script.extra, **options) as run:
        script.go(run)
    return script, run


def bare(name: str) -> Script:
    script = SCRIPTS[name]()
    script.go(Bare())
    return script


def place(name: str) -> str:
    return PLACE.get(name, "0.weight")


def left(script: Script) -> list[str]:
    return traces(Loop(script.model, script.optimizers, script.extra, list, lambda batch: batch))


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.mark.parametrize("options", [{}, {"detect": None}, {"recover": "repair"}], ids=["detect", "bare", "repair"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_disarmed_it_is_nothing(name: str, options: dict[str, Any]) -> None:
    untouched = bare(name)
    script, run = trained(name, **options)
    assert same(script.state(), untouched.state()), "bit for bit"
    assert len(run.signals["loss"]) == STEPS and not run.events and not run.incidents and left(script) == []


@pytest.mark.parametrize("name", CLIPPED)
def test_the_norm_of_the_gradient_is_that_before_clipping(name: str) -> None:
    """As the loop's own clipping has found it, at each step, with a short window of accumulation too."""
    script, run = trained(name)
    assert len(script.norms) == STEPS
    assert np.allclose(run.signals["grad_norm"], np.float32(script.norms), rtol=1e-5)


@pytest.mark.parametrize("kind", ["weight_bit", "gradient_bit", "reduced_gradient", "clipped", "update_bit"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_fault_strikes_once_and_where_its_record_says(name: str, kind: str) -> None:
    """The number that is struck stands in the array that the record names, which the loop's own hooks see."""
    script = SCRIPTS[name]()
    site = {"reduced_gradient": "reduced_gradient", "clipped": "clipped_gradient"}.get(kind)
    fault: dict[str, Any] = {"start": STRUCK, "tensor": place(name), "bit": -3, "element": 5}
    fault |= {"name": "gradient_bit", "site": site} if site else {"name": kind}
    weight = dict(script.model.named_parameters())[place(name) if name != "compiled" else f"_orig_mod.{place(name)}"]
    at_step: dict[int, Any] = {}
    options = {} if script.steps is None else {"steps": script.steps}
    with attach(script.model, script.optimizers, script.extra, detect=None, fault=fault, **options) as run:

        def before(optimizer: Any, *_: Any) -> None:
            gradient = weight.grad
            dense = None if gradient is None else gradient.to_dense().flatten()[5].item()
            at_step[run.step] = weight.detach().flatten()[5].item(), dense

        for optimizer in script.optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)
            if any(weight is one for group in inner.param_groups for one in group["params"]) or name == "added_groups":
                inner.register_step_pre_hook(before)
        script.go(run)
    (event,) = run.events
    assert (event.step, event.tensor, event.changed) == (STRUCK, place(name), True)
    assert np.ravel_multi_index(event.index, weight.shape) == 5
    of_weight, of_gradient = at_step[STRUCK]
    if kind == "weight_bit":
        assert of_weight == pytest.approx(float(event.after), rel=1e-6)
    if kind == "clipped":
        assert of_gradient == pytest.approx(float(event.after), rel=1e-6)
    untouched, clean = trained(name, detect=None)
    assert np.array_equal(run.signals["loss"][:STRUCK], clean.signals["loss"][:STRUCK])
    pairs = zip(script.model.parameters(), untouched.model.parameters(), strict=True)
    is_moved = not all(torch.equal(weight, its) for weight, its in pairs)  # a loss may hide a single small gradient
    assert is_moved or not np.array_equal(run.signals["loss"], clean.signals["loss"])  # and what is loaded a weight


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_twin_is_the_run_up_to_the_strike(name: str) -> None:
    fault = {"name": "weight_bit", "start": STRUCK, "tensor": place(name), "bit": -5}
    if words := REFUSED.get((name, "twin")):
        with pytest.warns(UserWarning, match=words):
            trained(name, detect=None, fault=fault, twin=True)
        return
    alone, _ = trained(name, detect=None, fault=fault)
    _, reference = trained(name, detect=None)
    script, run = trained(name, detect=None, fault=fault, twin=True)
    assert run.differing is None and same(script.state(), alone.state()), "the model is as the run has left it"
    assert not run.deviation[:STRUCK].any() and run.deviation[STRUCK:].any()
    assert run.twin_signals["loss"].tobytes() == reference.signals["loss"].tobytes(), "it is the clean run"


@pytest.mark.parametrize("name", SCRIPTS)
def test_repair_ends_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    """And alarms on line are those of the store."""
    fault = {"name": "weight_bit", "start": STRUCK, "tensor": place(name), "bit": -2}
    untouched = bare(name)
    script, run = trained(name, fault=fault, recover="repair", out=tmp_path)
    assert len(run.events) == 1 and len(run.incidents) == 1, run.events
    assert same(script.state(), untouched.state())
    sweep = open_sweep(tmp_path)
    for detector in ("combined", "finite"):
        replayed = alarms(sweep, detector)["alarm"].values[0]
        assert np.array_equal(sweep[f"alarm_{detector}"].values[0].astype(bool), replayed)
    assert left(script) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_lowest_bit_that_memory_loses_is_seen_and_undone(name: str) -> None:
    """And nothing that the loop itself does to its weights is taken for that."""
    fault = {"name": "weight_bit", "start": STRUCK, "tensor": place(name), "bit": 0}
    untouched = bare(name)
    script, run = trained(name, detect="checksum", recover="repair", fault=fault)
    assert same(script.state(), untouched.state())
    assert len(run.events) == len(run.incidents) == 1 and left(script) == []
    again, watched = trained(name, detect="checksum", fault=fault)
    assert np.flatnonzero(watched.signals["weights_changed"]).tolist() == [STRUCK]
    assert np.flatnonzero(watched.signals["alarm_checksum"]).tolist() == [STRUCK + 1] and left(again) == []


@pytest.mark.parametrize("start", range(STRUCK, STRUCK + 4))
@pytest.mark.parametrize("tensor", ["generator.0.weight", "critic.0.weight"])
def test_memory_of_an_optimizer_that_does_not_step_is_looked_at_too(tensor: str, start: int) -> None:
    fault = {"name": "weight_bit", "start": start, "tensor": tensor, "bit": 0}
    _, run = trained("alternating", detect="checksum", fault=fault)
    assert np.flatnonzero(run.signals["weights_changed"]).tolist() == [start]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_campaign_compares_each_fault_with_the_same_run(name: str, tmp_path: Path) -> None:
    """Flips of last bits at a late step change nearly nothing; the golden run is the clean one, bit for bit."""
    script = SCRIPTS[name]()
    before = script.state()
    fault = {"name": "weight_bit", "start": STRUCK, "until": STRUCK + 3, "tensor": place(name), "bit": 0}
    options: dict[str, Any] = {} if script.steps is None else {"steps": script.steps}

    def go() -> None:
        attach.campaign(
            script.go, script.model, script.optimizers, script.extra, fault=fault, samples=3, out=tmp_path, **options
        )

    if words := REFUSED.get((name, "campaign")):
        with pytest.raises(ConfigError, match=words):
            go()
        return
    go()
    assert same(script.state(), before) and left(script) == [], "left as it was"
    sweep = open_sweep(tmp_path)
    losses, is_golden = sweep["loss"].values, sweep["fault"].values == "none"
    _, clean = trained(name, detect=None)
    assert losses[is_golden].tobytes() == clean.signals["loss"].tobytes()
    apart = np.abs(losses[~is_golden] - losses[is_golden])
    assert len(apart) == 3 and not apart[:, :STRUCK].any() and apart.max() < SLIGHT[name == "bf16"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_error_leaves_nothing_behind(name: str) -> None:
    script = SCRIPTS[name]()
    options: dict[str, Any] = {} if script.steps is None else {"steps": script.steps}
    fault = {"name": "gradient_bit", "start": 3, "tensor": "*"}
    with (
        pytest.raises(ZeroDivisionError),
        attach(script.model, script.optimizers, script.extra, fault=fault, recover="repair", **options) as run,
    ):
        observe = run.observe

        def failing(loss: Any) -> None:
            observe(loss)
            if run.step == 3:
                raise ZeroDivisionError

        run.observe = failing
        script.go(run)
    assert left(script) == []
