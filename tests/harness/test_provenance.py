"""Where the first non-finite value came from: each fault is known to the bit, and none of that is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.ladder import canonical
from harness.nonfinite import provenance
from harness.nonfinite.trace import Origin, Origins
from harness.testing import engine
from harness.training.pack import Pack
from harness.training.sites import Site
from injectors.value import Value

START = 3
WEIGHTS = "blocks.1.attention.value"  # of two heads of eight rows
SITES = {
    Site.WEIGHT: "forward",
    Site.ACTIVATION: "forward",
    Site.ACTIVATION_GRADIENT: "backward",
    Site.GRADIENT: "backward",
    Site.REDUCED_GRADIENT: "backward",
    Site.CLIPPED_GRADIENT: "update",
    Site.MOMENT_1: "update",
    Site.MOMENT_2: "update",
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": True},
    "fused attention": {"attention": "fused"},
    "ranks": {"ranks": 2, "batch": 4},
    "micro-batches": {"micro_batches": 2, "batch": 4},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scaling": "dynamic"},
    "fp8": {"precision": "fp8"},
}


def strike(site: Site, **fields: Any) -> Value:
    """NaN, or what the fields say, in one element; of the value matrix or of what it gives."""
    given = {"tensor": WEIGHTS, "element": 9 * 16 + 5, "model": "nan", "start": START}
    return Value(site=site, **{**given, **fields})


@pytest.mark.parametrize("name", MODELS)
def test_nan_is_found_where_it_was_written(name: str) -> None:
    trials = [engine.trial(fault=strike(site), **MODELS[name]) for site in SITES]
    result = engine.run(trials, block=4).result
    for (site, direction), found, (event, *_) in zip(SITES.items(), result.provenance, result.events, strict=True):
        if direction == "backward" and name == "fp16" and site != Site.ACTIVATION:
            assert found == {}, "a scale that adapts takes gradients for an overflow, and the trial goes on"
            continue
        assert event.index is not None
        expected = {"step": START, "direction": direction, "site": site, "tensor": WEIGHTS, "layer": 1}
        expected |= {"index": list(event.index), "value": "nan", "cause": "strike", "rank": event.rank, "operation": ""}
        assert expected.items() <= found.items(), site
        is_tap = site in (Site.ACTIVATION, Site.ACTIVATION_GRADIENT)
        assert found["head"] == (event.index[1] if is_tap else event.index[0] // 8)
        assert (found["blamed"], found["blamed_site"]) == (WEIGHTS, site)
        assert found["blamed_index"] == list(event.index)
        assert found["evidence"] == ("state" if direction == "update" or site == Site.WEIGHT else "re-execution")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_named(rank: int) -> None:
    faults = [strike(site, rank=rank) for site in (Site.ACTIVATION, Site.ACTIVATION_GRADIENT, Site.GRADIENT)]
    found = engine.run([engine.trial(fault=fault, ranks=2, batch=4) for fault in faults], block=4).result.provenance
    assert [(one["rank"], one["blamed"], one["cause"]) for one in found] == [(rank, WEIGHTS, "strike")] * 3


def test_what_overflows_later_is_blamed_on_what_was_struck() -> None:
    """A flip of the highest bit of the exponent leaves a finite number, of which the model makes NaN further on."""
    value, up = ("blocks.0.attention.value", 199), ("blocks.1.feedforward.up", 50)
    sites = {Site.WEIGHT: value, Site.MOMENT_1: value, Site.ACTIVATION: up}
    faults = [
        strike(site, tensor=tensor, model="bit_flip", bit=30, element=element, start=4)
        for site, (tensor, element) in sites.items()
    ]
    result = engine.run([engine.trial(fault=fault) for fault in faults], block=8).result
    evidence = ("outlier", "outlier", "re-execution")
    for (site, (tensor, _)), found, why, events in zip(
        sites.items(), result.provenance, evidence, result.events, strict=True
    ):
        assert (found["cause"], found["format"], found["direction"]) == ("overflow", "fp32", "forward")
        assert (found["blamed"], found["blamed_site"], found["evidence"]) == (tensor, site, why)
        assert found["blamed_index"] == list(events[0].index or ())
        assert found["site"] == "activation" and found["operation"]


def test_a_format_that_overflows_is_named() -> None:
    big = strike(Site.WEIGHT, model="set", value=3e6)
    scale = Value(site="loss_scale", model="scale", value=2.0**40, start=START)
    fields = {"precision": "fp16", "loss_scaling": "static", "loss_scale": 1024.0}
    of_weight, of_scale = engine.run([engine.trial(fault=f, **fields) for f in (big, scale)], block=4).result.provenance
    assert (of_weight["cause"], of_weight["format"], of_weight["blamed"]) == ("overflow", "fp16", WEIGHTS)
    assert (of_weight["tensor"], of_weight["head"]) == (WEIGHTS, 1) and of_weight["value"] in ("inf", "-inf")
    assert (of_scale["cause"], of_scale["format"], of_scale["direction"]) == ("overflow", "fp16", "backward")
    assert (of_scale["blamed"], of_scale["evidence"]) == ("loss_scale", "setting")


def pushed(site: Site, tensor: str, format: str, value: float = 1e6) -> Value:
    """All elements of a tensor, made too large for many of them, in a narrower format."""
    return Value(
        site=site, tensor=tensor, elements=None, model="scale", value=value, format=format, start=START, duration=1
    )


@pytest.mark.parametrize(
    ("site", "tensor", "format", "value"),
    [
        (Site.ACTIVATION, "blocks.0.feedforward.up", "fp16", 1e6),
        (Site.ACTIVATION, "blocks.1.attention.value", "fp16", 1e6),
        (Site.ACTIVATION, "blocks.0.feedforward.up", "fp8_e5m2", 1e6),
        (Site.ACTIVATION, "blocks.0.feedforward.up", "bf16", 3e38),
        (Site.REDUCED_GRADIENT, WEIGHTS, "fp16", 1e8),
    ],
)
def test_a_tensor_that_overflowed_in_a_narrower_format_is_told_by_its_numbers(
    site: Site, tensor: str, format: str, value: float
) -> None:
    """No operation of the model has made it: a kernel computes in another format than the rest."""
    (found, _) = engine.run([engine.trial(fault=pushed(site, tensor, format, value)), engine.trial()]).result.provenance
    assert (found["tensor"], found["cause"], found["format"]) == (tensor, "overflow", format)
    assert found["operation"] == "" and found["value"] in ("inf", "-inf")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "set", "value": math.inf, "elements": None, "element": None},  # no number tells of its format
        {"model": "bit_flip", "bit": 30, "elements": 100, "element": None},
        {"model": "set", "value": math.inf, "elements": 100, "element": None},  # its numbers are of float32
    ],
)
def test_infinities_among_numbers_of_the_own_format_are_no_overflow(fields: Mapping[str, Any]) -> None:
    fault = strike(Site.ACTIVATION, tensor="blocks.0.feedforward.up", **fields)
    (found, _) = engine.run([engine.trial(fault=fault), engine.trial()]).result.provenance
    assert not found or (found["cause"], found["format"]) in (("strike", ""), ("overflow", "fp32"))


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 1e30), ("adamw", 1e25), ("sgd", 1e38), ("lion", 1e37)])
def test_a_run_that_diverges_by_itself_blames_nothing(optimizer: str, rate: float) -> None:
    fields = {"name": optimizer, "lr": rate, "decay": "constant", "warmup": 0}
    (found, other) = engine.run([engine.trial(**fields), engine.trial(seed=1, **fields)], block=4).result.provenance
    for one in (found, other):
        assert one["cause"] == "overflow"
        assert (one["blamed"], one["evidence"]) == ("", "unknown")


def test_a_weight_is_named_that_no_fault_has_touched() -> None:
    """What is wrong in the state is found without a fault, and so without its record."""

    def prepare(pack: Pack) -> None:
        pack.tensors(pack.weights, 0)[WEIGHTS][3, 4] = 1e38

    found, other = engine.run([engine.trial(), engine.trial(seed=1)], prepare=prepare).result.provenance
    assert (found["step"], found["blamed"], found["blamed_index"]) == (0, WEIGHTS, [3, 4])
    assert found["evidence"] == "outlier" and other == {}


def test_finding_it_changes_nothing_else() -> None:
    """Neither healthy trials nor those that freeze, nor what is known of their faults, which may remember things."""
    healthy = engine.trial(fault=strike(Site.WEIGHT, model="bit_flip", bit=3))
    lost = [engine.trial(fault=strike(site, duration=None)) for site in SITES]
    trials = [engine.trial(), healthy, *lost]
    with_it, without = (engine.run(trials, block=4, provenance=on) for on in (True, False))
    engine.assert_same_trials(with_it, without)
    assert without.result.provenance == [{}] * len(trials)
    assert [bool(found) for found in with_it.result.provenance] == [False, False] + [True] * len(lost)
    for name in ("events", "strikes", "changes", "nonfinite_step", "digest"):
        assert getattr(with_it.result, name) == getattr(without.result, name), name


def test_it_is_found_after_an_answer_to_an_earlier_alarm() -> None:
    """Which has left a mark on the trial: its rate is lower from there on."""
    ladder = canonical([{"detector": "grad_norm_skip", "action": "lower_rate+skip", "limit": 1}])
    watched = {"detect": {"name": "grad_norm_skip"}, "detect.grad_norm_skip": {"limit": 1e-6}}
    golden = engine.trial(**watched, playbook={"name": "own", "ladder": ladder})
    found = engine.run([golden, replace(golden, fault=strike(Site.GRADIENT))], block=4).result
    assert found.incidents[1] and found.provenance[1]["cause"] == "strike"
    assert found.provenance[1]["tensor"] == WEIGHTS


def test_forks_give_the_same() -> None:
    golden = engine.trial()
    trials = [golden, *(engine.trial(fault=strike(site)) for site in SITES)]
    forked = engine.assert_fork_equals_full_run(trials, block=4)
    assert all(forked.result.provenance[1:])


def test_a_trial_that_shares_its_lost_twin_shares_its_provenance() -> None:
    fields = {"lr": 1e30, "decay": "constant", "warmup": 0}
    late = engine.trial(fault=strike(Site.WEIGHT, start=7), **fields)
    other = engine.trial(fault=strike(Site.WEIGHT, start=7, element=1), **fields)
    run = engine.run([engine.trial(**fields), late, other], forks=True, block=4)
    golden, *rest = run.result.provenance
    assert golden and rest == [golden] * 2


def test_it_survives_kills(tmp_path: Path) -> None:
    trials = [engine.trial(), *(engine.trial(fault=strike(site)) for site in SITES)]
    engine.assert_resumes(trials, tmp_path, kills=[START + 1, START + 3], block=2)


def test_rows_at_different_steps_are_lost_at_their_own() -> None:
    def ahead(pack: Pack) -> None:
        """The second row is where the others will be in two steps."""
        dict(pack.rows_state)["step"][1] = 2
        pack.row_steps.read()

    faults = [strike(Site.WEIGHT, start=5), strike(Site.REDUCED_GRADIENT, start=5), strike(Site.ACTIVATION, start=6)]
    trials = [engine.trial(fault=fault) for fault in faults]
    together, apart = (engine.run(trials, prepare=one, block=4).result for one in (lambda pack: None, ahead))
    for one, other, fault in zip(together.provenance, apart.provenance, faults, strict=True):
        assert one["step"] == other["step"] == fault.start
        for name in ("site", "tensor", "index", "cause", "blamed", "blamed_index", "evidence"):
            assert one[name] == other[name], name


def test_a_step_that_cannot_run_again_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(provenance, "Rerun", fails)
    trials = [engine.trial(fault=strike(Site.WEIGHT)), engine.trial()]
    with pytest.warns(UserWarning, match=r"step 3 could not run once more.*out of memory"):
        found, other = engine.run(trials, block=4).result.provenance
    assert (found["step"], found["cause"], found["blamed"], other) == (START, "unknown", "", {})


# --- operations -------------------------------------------------------------------------------------------------------


def origin(compute: Any) -> tuple[Tensor, Origin | None]:
    """What a computation gives, and where it is from."""
    origins = Origins(lambda x: None)
    with origins:
        x = compute()
    assert not bool(torch.isfinite(x).all())
    return x, origins.of(x)


ONES = torch.ones(4)
CAUSES: Mapping[str, tuple[Any, tuple[str, str]]] = {
    "product": (lambda: (ONES * 1e30 * 1e30) + 1, ("overflow", "fp32")),
    "sum of both signs": (lambda: torch.tensor([[3e38, 3e38, -3e38]]) @ (ONES[:3, None] * 10), ("overflow", "fp32")),
    "cast": (lambda: (ONES * 7e4).to(torch.float16).float() * 2, ("overflow", "fp16")),
    "norm": (lambda: torch.native_layer_norm(ONES.cumsum(0) * 1e30, [4], None, None, 0.0)[0], ("overflow", "fp32")),
    "0/0": (lambda: (ONES - 1) / (ONES - 1) + 3, ("0/0", "fp32")),
    "1/0": (lambda: ONES / (ONES - 1), ("invalid", "fp32")),
    "root": (lambda: (-ONES).sqrt() * 2, ("invalid", "fp32")),
    "inf - inf": (lambda: torch.softmax(torch.full((4,), -math.inf) + ONES, 0), ("inf - inf", "fp32")),
    "in place": (lambda: (ONES * 1e30).mul_(1e30).sub_(1), ("overflow", "fp32")),
    "double": (lambda: (ONES.double() * 1e300) ** 2, ("overflow", "fp64")),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_told_from_the_others(name: str) -> None:
    compute, expected = CAUSES[name]
    _, found = origin(compute)
    assert found is not None and (found.cause, found.format) == expected


def test_what_no_operation_made_has_no_origin() -> None:
    origins = Origins(lambda x: None)
    with origins:
        x = ONES * 2
        with origins.quiet():
            x[1] = math.nan
        y = x + 1
    assert origins.of(x) is None and origins.of(y) is None


def test_a_mask_is_no_origin_and_hides_none() -> None:
    seen = []
    origins = Origins(seen.append)
    mask = torch.full((4, 4), -math.inf).triu(1)
    with origins:
        shares = torch.softmax(torch.ones(4, 4) + mask, -1)
        assert bool(torch.isfinite(shares).all()) and seen == []
        big = torch.ones(4, 4) * 3e38 * 10 + mask
    found = origins.of(big)
    assert found is not None and found.operation == "mul" and seen
