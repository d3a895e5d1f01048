"""Clippers in a pack: what they remember, and what a gradient that is not what it should be does to them."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch

from harness.objectives.outcome import NON_FINITE
from harness.optim.clipping import global_norm
from harness.optim.optimizers.adamw import AdamW
from harness.optim.optimizers.spam import Options as SPAMOptions
from harness.testing import engine
from harness.testing.changes import Change
from harness.training.sites import Site
from tests.harness.features import CLIPS
from tests.harness.test_clippers import ADAGCS, ZCLIPS, AdaGC, ZClip, a_clipper, stream, trials_of

COUNT, STRUCK, STEPS = 7, 8, 12
LENGTH = {"steps": STEPS, "validate_every": STEPS, "warmup": 2, "depth": 1}
GAPS = {"width": 30, "head_dim": 10, "vocabulary": 61, "feedforward": 101}  # sizes that leave room between tensors
LIMITS = {kind: fields for kind, fields in CLIPS.items() if not kind.startswith("qk_clip")}
MEMORY = {"zclip": ZClip, "adagc": AdaGC}


def trials(kind, count, **others):
    """Every limit acts in these runs, and every warm-up ends before the strike."""
    return trials_of([engine.in_turn(LIMITS[kind], r) for r in range(count)], **{**LENGTH, **others})


@cache
def clean(kind):
    """Seven trials with their own limits."""
    return engine.run(trials(kind, COUNT, **GAPS))


@cache
def ruined(kind, detection=True):
    """The same trials; in one all gradients are a million times too large, in each of four others an element is off."""
    spoilt = {r: spoil(value) for r, value in SPOILT.items()}
    return engine.run(trials(kind, COUNT, **GAPS), {SPIKED: times(1e6), **spoilt}, detection=detection)


def spoil(value, steps=range(STRUCK, STRUCK + 1)):
    """One element of one tensor."""
    return Change(Site.REDUCED_GRADIENT, steps, lambda t: t["blocks.0.feedforward.up"].view(-1)[5].fill_(value))


def times(factor):
    def change(tensors):
        for tensor in tensors.values():
            tensor.mul_(factor)

    return Change(Site.REDUCED_GRADIENT, range(STRUCK, STRUCK + 1), change)


SPOILT = {2: math.inf, 3: math.nan, 4: 1e30, 5: -math.inf}
SPIKED = 1


def memory_of(pack, kind, row):
    return {name: values[row].clone() for name, values in pack.rows_state if name.startswith(kind)}


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clip_value", "clip_tensor", "zclip", "adagc", "clip"])
def test_a_row_that_is_not_active_is_left_as_it_is(kind):
    """Its gradients, and what is remembered of it."""
    many = trials(kind, 3)
    pack = engine.pack_of(many)
    (clipper,) = pack.clippers
    for step, gradients in enumerate(stream(pack.layout, 3, torch.float32, 16)):
        if step in (8, 14):
            gradients[1, 5] = math.nan if step == 8 else math.inf
        before, remembered = gradients.clone(), memory_of(pack, kind, 1)
        clipper.clip(gradients, global_norm(gradients), torch.tensor([True, step < 6, True]))
        if step < 6:
            continue
        assert torch.equal(engine.bits(gradients[1]), engine.bits(before[1]))
        assert engine.same_bits(remembered, memory_of(pack, kind, 1)) == []
    assert torch.isfinite(gradients[[0, 2]]).all()
    if kind in MEMORY:
        assert engine.same_bits(memory_of(pack, kind, 0), memory_of(pack, kind, 1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [2, 9])
@pytest.mark.parametrize("kind", MEMORY)
def test_what_is_not_finite_is_never_remembered(kind, step, value):
    """While warming up and later: the step might not have been."""
    options = {"zclip": dataclasses.replace(ZCLIPS[0], warmup=5), "adagc": dataclasses.replace(ADAGCS[0], warmup=5)}
    one = [engine.trial(**{kind: options[kind]})] * 2
    clipper, layout, state = a_clipper(MEMORY[kind], one)
    spared, _, state_of_spared = a_clipper(MEMORY[kind], one)
    for number, gradients in enumerate(stream(layout, 2, torch.float32, 14)):
        everywhere, untouched = torch.ones(2, dtype=torch.bool), gradients.clone()
        if number == step:
            layout.view(gradients, "head")[1, 3, 2] = value
        clipper.clip(gradients, global_norm(gradients), everywhere)
        assert number == step or torch.isfinite(gradients).all()
        spared.clip(untouched, global_norm(untouched), torch.tensor([True, number != step]))
    assert all(torch.isfinite(values).all() for _, values in state)
    assert engine.same_bits(dict(state), dict(state_of_spared)) == []


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_stays_finite_without_detection(kind):
    """Though the weights of the trial are ruined, and every gradient after that."""
    run = ruined(kind, detection=False)
    for r, value in SPOILT.items():
        if not math.isfinite(value):
            assert run.pack.weights[r].isnan().any() and np.isnan(run.signals["grad_norm"][r, STRUCK + 1 :]).all()
        assert all(torch.isfinite(x).all() for x in memory_of(run.pack, kind, r).values())


@pytest.mark.parametrize("kind", MEMORY)
def test_a_spike_is_remembered_as_it_was_clipped(kind):
    """A gradient a million times too large leaves averages that are like those before it."""
    run, healthy = ruined(kind), clean(kind)
    spike, usual = (each.signals["grad_norm"][SPIKED, STRUCK] for each in (run, healthy))
    assert spike == pytest.approx(1e6 * usual, rel=1e-5)
    assert np.isfinite(run.signals["loss"][SPIKED]).all()
    found, expected = (memory_of(each.pack, kind, each.pack.rows.index(SPIKED)) for each in (run, healthy))
    name = {"zclip": "zclip_mean", "adagc": "adagc_average"}[kind]
    assert (found[name] < 2 * expected[name]).all() and (found[name] > expected[name] / 2).all()


def test_adagc_trains_what_has_no_gradient_at_first():
    """In muP the head starts at zero, so that nothing below it has a gradient in the first step."""
    options = dataclasses.replace(ADAGCS[0], warmup=5)
    many = trials_of([{"adagc": options}] * 2, parametrization="mup", lr=1e-2, **LENGTH)
    run = engine.run(many)
    average = memory_of(run.pack, "adagc_average", 0)["adagc_average"]
    assert (average > 0).all() and torch.isfinite(average).all()
    before, after = run.weights[6][0], run.weights[-1][0]
    for scaled in run.pack.layout.tensors:
        assert not torch.equal(*(run.pack.layout.view(w[None], scaled.name) for w in (before, after))), scaled.name


# --- what freezes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIMITS)
def test_an_element_that_is_not_finite_freezes_unless_it_becomes_the_bound(kind):
    """Scaling by a norm leaves NaN where infinity was; clipping by value comes first, and leaves NaN alone."""
    run, values = ruined(kind), {r: value for r, value in SPOILT.items() if not math.isfinite(value)}
    saved = [2, 5] if kind in ("clip_value", "all") else []
    assert run.result.nonfinite_step == [STRUCK if r in values and r not in saved else None for r in range(COUNT)]
    for r, value in values.items():
        assert (run.result.outcome[r] == NON_FINITE) == (r not in saved)
        assert run.signals["grad_norm"][r, STRUCK] == pytest.approx(abs(value), nan_ok=True)
        assert np.isfinite(run.signals["grad_norm"][r, STRUCK + 1 :]).all() == (r in saved)
        assert torch.isfinite(run.weights[STRUCK][r]).all()


def test_an_infinite_element_moves_its_weight_as_far_as_the_bound_does():
    one = trials("clip_value", 2)[1]
    run = engine.run([one] * 3, {0: spoil(-math.inf), 1: spoil(-one.optim.clip_value)})
    infinite, bound, neither = run.weights[-1].values()
    assert torch.equal(engine.bits(infinite), engine.bits(bound)) and not torch.equal(infinite, neither)


@cache
def unclipped_and_scaled():
    return engine.run(trials_of([{}] * 3, **LENGTH, **SCALED))


SCALED = {"loss_scaling": "dynamic", "loss_scale": 1024.0}


@pytest.mark.parametrize("kind", ["clip_value", "zclip", "adagc"])
def test_with_dynamic_loss_scaling_an_overflow_costs_the_step(kind):
    """Before anything clips it, as in torch: unscale_ looks for it, step is skipped, and nothing remembers it."""
    run = engine.run(trials(kind, 3, **SCALED), {1: spoil(math.inf)})
    assert run.result.nonfinite_step == [None] * 3
    assert run.signals["loss_scale"][1].tolist() == [1024.0] * (STRUCK + 1) + [512.0] * (STEPS - STRUCK - 1)
    assert (unclipped_and_scaled().signals["loss_scale"] == 1024).all()
    before, at = (run.weights[step][1] for step in (STRUCK - 1, STRUCK))
    assert torch.equal(engine.bits(before), engine.bits(at))
    counts = [x for name, x in memory_of(run.pack, kind, 1).items() if name.endswith("count")]
    assert all(count == STEPS - 1 for count in counts) and bool(counts) == (kind in MEMORY)


def test_what_acts_first_decides_whether_infinity_is_repaired(monkeypatch):
    """An optimizer that could repair it never sees it behind a norm."""
    monkeypatch.setattr(AdamW, "repairs_infinity", True)
    ways = [
        ({}, True),
        ({"clip": 1.0}, False),
        ({"loss_scaling": "dynamic"}, False),
        ({"loss_scaling": "static"}, True),
    ]
    pack = engine.pack_of([engine.trial(**fields) for fields, _ in ways])
    infinite = torch.full((len(ways),), math.inf, dtype=torch.float64)
    assert pack.can_step(infinite).tolist() == [repaired for _, repaired in ways]
    assert not pack.can_step(infinite * 0).any() and pack.can_step(infinite.clamp(max=1)).all()
    pack.gradients.fill_(math.inf).index_fill_(1, pack.layout.padding, 0.0)
    pack.clip(infinite, torch.ones(len(ways), dtype=torch.bool))
    assert pack.gradients.isnan().any(1).tolist() == [False, True, False, False]

    for fields, repaired in (
        ({"clip_tensor": 1.0}, False),
        ({"clip_value": 1.0}, True),
        ({"clip_value": 1.0, "clip_tensor": 1.0, "clip": 1.0}, True),
        ({"zclip": ZCLIPS[0]}, False),
        ({"adagc": ADAGCS[0], "clip_value": 1.0}, True),
        ({"adagc": ADAGCS[0]}, False),
    ):
        pack = engine.pack_of(trials_of([fields] * 2))
        assert pack.can_step(infinite[:2]).tolist() == [repaired] * 2, fields


@pytest.mark.parametrize(("name", "sections"), [("lion", {}), ("spam", {"spam": SPAMOptions(grace=2, interval=500)})])
def test_an_optimizer_that_repairs_infinity_is_not_shown_it_behind_a_norm(name, sections):
    """In one pack with a trial that has no limit."""
    ways = [{}, {"clip": 0.5}, {}, {"clip": 0.5}, {}]
    many = [engine.trial(seed=r, name=name, lr=1e-4, **way, **sections, **LENGTH) for r, way in enumerate(ways)]
    run = engine.run(many, {r: spoil(math.inf) for r in (0, 1)})
    assert run.result.nonfinite_step == [None, STRUCK, None, None, None]
    assert np.isfinite(run.signals["loss"][0]).all() and torch.isfinite(run.weights[-1][0]).all()
