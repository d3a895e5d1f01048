"""Loss scaling against torch.amp.GradScaler, and as a part of a trial's state."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.config import LARGEST_SCALE, SMALLEST_SCALE, ConfigError
from harness.faults.facts import facts_of
from harness.model.state import State
from harness.objectives.outcome import NON_FINITE
from harness.optim.loss_scale import LossScale
from harness.testing import engine
from harness.testing.changes import Change
from harness.training.config_checks import check_trial
from harness.training.sites import Site
from injectors.value import Value
from tests.plain_gpt import plain_of, tensors

DYNAMIC = {"loss_scaling": "dynamic"}
NOTHING = {"loss_scaling": "none"}


def spoil(steps, value=math.inf, site=Site.REDUCED_GRADIENT):
    return Change(site, steps, lambda tensors: tensors["head"][3].fill_(value))


def scales(run, trial=0):
    return run.signals["loss_scale"][trial].tolist()


def unscaled(run, trial):
    """Whatever the trial left but the signal of its scale."""
    return {name: values for name, values in run[trial].items() if name != "loss_scale"}


# --- against torch.amp.GradScaler -----------------------------------------------------------------------------------


def grad_scaler(trial):
    return torch.amp.GradScaler("cpu", init_scale=trial.train.loss_scale, growth_interval=trial.train.loss_scale_growth)


def test_scales_are_those_of_grad_scaler():
    """Three trials with their own overflows, for 300 steps; one reaches the largest number and stays there."""
    trials = [
        engine.trial(**DYNAMIC, loss_scale=scale, loss_scale_growth=growth)
        for scale, growth in ((65536.0, 7), (0.3, 1), (LARGEST_SCALE, 3))
    ]
    ours = LossScale(trials, torch.float32, torch.device("cpu"), State(len(trials)))
    ours.bind(trials)
    chances = torch.tensor([0.1, 0.5, 0.02])
    overflows = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)) < chances
    theirs = [(grad_scaler(t), nn.Parameter(torch.ones(1))) for t in trials]
    optimizers = [torch.optim.SGD([weight]) for _, weight in theirs]
    seen = []
    for overflowed in overflows:
        go_on = ours.adapt(~overflowed, torch.ones(3, dtype=torch.bool))
        assert go_on.all()
        for is_over, (scaler, weight), optimizer in zip(overflowed.tolist(), theirs, optimizers, strict=True):
            scaler.scale(weight.sum()).backward()
            weight.grad.fill_(math.inf if is_over else 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert ours.scale.tolist() == [scaler.get_scale() for scaler, _ in theirs]
        assert ours.clean.tolist() == [scaler._get_growth_tracker() for scaler, _ in theirs]
        seen.append(ours.scale.clone())
    seen = torch.stack(seen)
    assert (seen.amax(0) >= 2 * seen.amin(0)).all() and seen.max() == 2.0**127


def test_a_negative_scale_is_halved_like_another():
    """A flipped sign bit changes no gradient, so it must not end the run at the next overflow."""
    trials = [engine.trial(**DYNAMIC)] * 2
    ours = LossScale(trials, torch.float32, torch.device("cpu"), State(len(trials)))
    ours.bind(trials)
    ours.scale[1] *= -1
    assert ours.adapt(torch.tensor([False, False]), torch.tensor([True, True])).all()
    assert ours.scale.tolist() == [32768.0, -32768.0]
    ours.adapt(torch.tensor([False, False]), torch.tensor([True, False]))
    assert ours.scale.tolist() == [16384.0, -32768.0], "that of a frozen trial stays"


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_trial_equals_a_plain_loop_with_grad_scaler(clip, value):
    """In float64, to 1e-9 as without loss scaling; three steps overflow, two of them in a row.

    The sizes leave gaps between the tensors of the flat arrays, which nothing may reach.
    """
    steps, bad, own = 20, (3, 9, 10), {**DYNAMIC, "loss_scale": 1024.0, "loss_scale_growth": 4}
    own |= {"width": 6, "head_dim": 6, "vocabulary": 61, "precision": "fp64", "warmup": 0}
    trials = [engine.trial(seed=r, steps=steps, clip=clip, **own) for r in range(2)]
    trials = [dataclasses.replace(t, schedule=dataclasses.replace(t.schedule, decay="constant")) for t in trials]
    fresh, run = engine.pack_of(trials), engine.run(trials, {1: spoil(bad, value)})
    plain, adamw = plain_of(trials[1], fresh, 1)
    scaler, losses, in_force = grad_scaler(trials[1]), [], []
    for step in range(steps):
        tokens = fresh.objective.batch(step)[1]
        loss = F.cross_entropy(plain(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        adamw.zero_grad()
        in_force.append(scaler.get_scale())
        scaler.scale(loss).backward()
        if step in bad:
            plain.head.weight.grad[3] = value
        scaler.unscale_(adamw)
        nn.utils.clip_grad_norm_(plain.parameters(), math.inf if clip is None else clip)
        scaler.step(adamw)
        scaler.update()
        losses.append(loss.item())
    assert run.result.nonfinite_step == [None, None] and NON_FINITE not in run.result.outcome
    assert scales(run, 1) == in_force and set(in_force) == {1024.0, 512.0, 256.0}
    np.testing.assert_allclose(run.signals["loss"][1], losses, rtol=0, atol=1e-9)
    for name, weight in tensors(plain).items():
        found = run.pack.tensors(run.pack.weights, 1)[name]
        torch.testing.assert_close(found, weight.detach(), rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert run.pack.optimizer.updates.tolist() == [steps, steps - len(bad)]


def test_a_scale_that_is_no_power_of_two_changes_rounding_alone():
    trials = [engine.trial(loss_scaling=kind, loss_scale=1000.0) for kind in ("none", "static")]
    run = engine.run(trials)
    np.testing.assert_allclose(run.signals["loss"][1], run.signals["loss"][0], rtol=1e-5)
    assert engine.same_bits(unscaled(run, 0), unscaled(run, 1))


# --- what scaling is for --------------------------------------------------------------------------------------------


SHAPE = {"clip": 0.5, "qk_norm": True, "steps": 5}


@cache
def without_scaling(ranks, precision):
    return engine.run([engine.trial(seed=r, ranks=ranks, precision=precision, **SHAPE) for r in range(3)])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_a_power_of_two_changes_no_bit(kind, ranks, precision):
    """Multiplying by it is exact, and so is dividing, where nothing overflows or underflows."""
    shape = {"ranks": ranks, "precision": precision, **SHAPE}
    plain = without_scaling(ranks, precision)
    scaled = engine.run([engine.trial(seed=r, loss_scaling=kind, loss_scale=2.0 ** (8 * r), **shape) for r in range(3)])
    assert [engine.same_bits(unscaled(plain, r), unscaled(scaled, r)) for r in range(3)] == [[], [], []]
    assert [scales(scaled, r) for r in range(3)] == [[2.0 ** (8 * r)] * 5 for r in range(3)]
    assert scales(plain) == [1.0] * 5


def test_fp16_loses_small_gradients_without_it():
    """A head of numbers as small as 2^-23 sends gradients of some 1e-9 into the blocks; fp16 begins at 6e-8."""

    def gradients(precision, **scaling):
        pack = engine.pack_of([engine.trial(precision=precision, batch=8, **scaling)] * 2)
        pack.tensors(pack.weights, 0)["head"].sign_().mul_(2.0**-23)
        pack.learn(pack.objective.batch(0))
        pack.loss_scale.unscale(pack.gradients)
        return pack.tensors(pack.gradients, 0)

    exact, lost, kept = (
        gradients("fp32"),
        gradients("fp16"),
        gradients("fp16", loss_scaling="static", loss_scale=2.0**17),
    )
    # Those of queries and keys are smaller still, because they are differences between shares.
    inside = [name for name in exact if name.endswith((".value", ".projection", ".up", ".down"))]
    assert len(inside) == 8
    for name in inside:
        assert not lost[name].any() and exact[name].any(), name
        # 2^17 lifts them to some 1e-4, where fp16 rounds by 2^-12, and a few of them to where it rounds by 2^-8.
        assert (kept[name] - exact[name]).norm() < 0.01 * exact[name].norm(), name


def test_overflow_skips_the_step_and_halves_the_scale():
    """Some gradients are about 1, so 2^28 overflows fp16: the scale falls until they fit, and again when they grow."""
    ways = (("dynamic", 2.0**28), ("static", 2.0**28), ("none", 1.0), ("dynamic", 1.0), ("static", 8.0))
    trials = [
        engine.trial(seed=1, precision="fp16", steps=20, loss_scaling=kind, loss_scale=scale) for kind, scale in ways
    ]
    run = engine.run(trials)
    assert run.result.nonfinite_step == [None, 0, None, None, None]
    in_force, norm, moved = scales(run), run.signals["grad_norm"][0], run.signals["update_rms"][0]
    skipped = ~np.isfinite(norm)
    assert skipped[:8].all() and 8 < skipped.sum() < 16 and np.isfinite(run.signals["loss"][0]).all()
    assert in_force == [2.0 ** (28 - skipped[:step].sum()) for step in range(20)]
    assert ((moved == 0) == skipped)[:-1].all(), "at the last step the learning rate is zero"
    weights = [engine.pack_of(trials).weights[0], *(left[0] for left in run.weights)]
    stayed = [torch.equal(before, after) for before, after in zip(weights, weights[1:], strict=False)]
    assert stayed[:-1] == skipped[:-1].tolist()
    assert run.pack.optimizer.updates[run.pack.rows.index(0)] == 20 - skipped.sum()


def test_clean_steps_double_the_scale():
    trials = [engine.trial(steps=10, **DYNAMIC, loss_scale=4.0, loss_scale_growth=g) for g in (3, 4)]
    run = engine.run(trials, {1: spoil([5])})
    assert scales(run, 0) == [4, 4, 4, 8, 8, 8, 16, 16, 16, 32]
    assert scales(run, 1) == [4, 4, 4, 4, 8, 8, 4, 4, 4, 4]


# --- what freezes ---------------------------------------------------------------------------------------------------


def test_what_freezes_a_trial():
    """A loss that is not finite does, and so does a gradient where nothing can be halved."""
    trials = [
        engine.trial(seed=r, loss_scaling=kind) for r, kind in enumerate(["dynamic", "dynamic", "static", "none"])
    ]
    at_weights = spoil([4], math.nan, Site.WEIGHT)
    run = engine.run([*trials, engine.trial(**DYNAMIC)], {0: at_weights, 1: spoil([4]), 2: spoil([4]), 3: spoil([4])})
    assert run.result.nonfinite_step == [4, None, 4, 4, None]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_scale_that_falls_too_low_freezes_the_trial(clip):
    first = SMALLEST_SCALE * 4
    trials = [engine.trial(seed=r, **DYNAMIC, loss_scale=first, clip=clip, steps=10) for r in range(5)]
    run = engine.run(trials, {1: spoil(range(10), math.nan)})
    assert run.result.nonfinite_step == [None, 2, None, None, None] and run.result.outcome[1] == NON_FINITE
    assert scales(run, 1)[:4] == [first, first / 2, first / 4, pytest.approx(math.nan, nan_ok=True)]


def test_without_detection_overflow_still_skips():
    """Detection only watches; that a step is skipped belongs to the recipe."""
    trials = [engine.trial(seed=r, **DYNAMIC) for r in range(2)]
    watched, unwatched = (engine.run(trials, {1: spoil([3])}, detection=on, telemetry=on) for on in (True, False))
    for i in range(2):
        left, right = (
            {name: run[i][name] for name in ("loss", "loss_scale", "weights")} for run in (watched, unwatched)
        )
        assert engine.same_bits(left, right) == []


# --- the site -------------------------------------------------------------------------------------------------------


def fault_at_scale(**fields):
    return Value(**{"site": "loss_scale", "model": "scale", "start": 3, **fields})


def test_a_fault_changes_the_scale_in_force_for_good():
    trials = [
        engine.trial(fault=fault_at_scale(value=0.25), loss_scaling=kind, loss_scale=64.0, loss_scale_growth=2)
        for kind in ("static", "dynamic", "none")
    ]
    run = engine.run([*trials, trials[0].golden])
    assert scales(run, 0) == [64, 64, 64, 16, 16, 16, 16, 16]
    assert scales(run, 1) == [64, 64, 128, 32, 64, 64, 128, 128]
    assert scales(run, 2) == [1] * 8 and scales(run, 3) == [64] * 8
    assert run.result.strikes == run.result.changes == [1, 1, 0, 0], "where nothing is scaled it never fires"
    assert [(event.before, event.after) for event in run.result.events[0]] == [("64.0", "16.0")]
    trials[1].fault.check(facts_of(trials[1]))
    with pytest.raises(
        ConfigError, match="fault.site=loss_scale: train.loss_scaling=none has no scale; allowed: anoth"
    ):
        trials[2].fault.check(facts_of(trials[2]))


def test_a_fault_pushes_fp16_past_its_range():
    """2^20 times the scale overflows: a static one ends the run, a dynamic one recovers by halving."""
    trials = [
        engine.trial(fault=fault_at_scale(value=2.0**20), loss_scaling=kind, precision="fp16", steps=30, seed=1)
        for kind in ("static", "dynamic")
    ]
    run = engine.run([*trials, *(t.golden for t in trials)])
    assert run.result.nonfinite_step == [3, None, None, None]
    assert scales(run, 1)[3] == 2.0**36 and 2.0**16 <= scales(run, 1)[-1] < 2.0**28
    for faulty, golden in ((0, 2), (1, 3)):
        for name, values in run.signals.items():
            if name not in ("tokens_per_second", "step_seconds"):
                assert np.array_equal(values[faulty, :3], values[golden, :3], equal_nan=True), name


RUINED = (0.0, math.inf, math.nan, -1.0, 1e-45, 3e38)


@cache
def with_scales(kind, values):
    """A trial, its copies with each of these scales from step 3 (None: as it is), and two more."""
    trials = [engine.trial(seed=r, loss_scaling=kind, clip=0.5) for r in (0, *[2] * len(values), 3, 4)]

    def ruin(value):
        return Change(Site.LOSS_SCALE, range(3, 4), lambda found: found["loss_scale"].fill_(value))

    return engine.run(trials, {row: ruin(value) for row, value in enumerate(values, 1) if value is not None})


@pytest.mark.parametrize("value", RUINED)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_ruined_scale_stays_in_its_trial(kind, value):
    """Minus one scales as well as one. All other values leave nothing that could be halved."""
    run, healthy = with_scales(kind, RUINED), with_scales(kind, (None,) * len(RUINED))
    assert all(engine.same_bits(run[row], healthy[row]) == [] for row in (0, len(RUINED) + 1, len(RUINED) + 2))
    row = 1 + RUINED.index(value)
    if value == -1:
        assert engine.same_bits(unscaled(run, row), unscaled(healthy, row)) == []
    elif value == 3e38:
        assert run.result.nonfinite_step[row] in (None, 3), "its reciprocal is a subnormal number, which still divides"
    else:
        assert run.result.nonfinite_step[row] == 3


@pytest.mark.parametrize(("value", "more_clean", "masked"), [(1.0, 0, 3), (2.0, 0, None), (1.0, 1, None)])
def test_another_scale_is_another_state(value, more_clean, masked):
    """Twice the scale changes no weight, but the trial is its twin again only if its scale and what that awaits are."""

    def prepare(pack):
        pack.loss_scale.clean[0] += more_clean

    faulty = engine.trial(fault=fault_at_scale(value=value), **DYNAMIC)
    run = engine.run([faulty, faulty.golden], prepare=prepare)
    assert np.array_equal(run.signals["loss"][0], run.signals["loss"][1])
    assert run.result.masked_step == [masked, None]


def mixed(**fields):
    """Five trials, each scaling in its own way."""
    ways = [
        {**DYNAMIC, "loss_scale": 2.0**26, "loss_scale_growth": 2},
        {**DYNAMIC, "loss_scale": 1024.0, "loss_scale_growth": 3},
        {"loss_scaling": "static", "loss_scale": 3.0},
        {"loss_scaling": "static"},
        NOTHING,
    ]
    return [engine.trial(seed=r, **way, **fields) for r, way in enumerate(ways)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_rows_that_pass_in_parts_keep_their_scales(precision):
    trials = mixed(precision=precision, steps=8)
    order, together = [0, 1, 2, 3, 4] * 3 + [4, 3, 2, 1, 0], engine.run(trials)
    in_parts = engine.run([trials[i] for i in order])
    assert len(in_parts.pack.parts) > 1, "rows pass through the model in parts"
    assert [engine.same_bits(in_parts[row], together[i]) for row, i in enumerate(order)] == [[]] * 20
    assert (scales(together)[0] > scales(together)[-1]) == (precision == "fp16")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fork_takes_the_scale_along(precision):
    golden = mixed(precision=precision, steps=12)
    infinite = Value(start=5, site="reduced_gradient", model="infinity", tensor="head", seed=1)
    faulty = [dataclasses.replace(trial, fault=infinite) for trial in golden]
    faulty.append(dataclasses.replace(golden[1], fault=fault_at_scale(start=7, value=2.0)))
    forked = engine.assert_fork_equals_full_run([*golden, *faulty], block=4)
    assert forked.result.nonfinite_step[5:] == [None, None, 5, 5, 5, None]


def test_a_pack_that_shrinks_keeps_the_scales():
    trials = mixed(steps=12)
    doomed = [dataclasses.replace(t, optim=dataclasses.replace(t.optim, lr=1e30)) for t in trials[:2]]
    run, reference = engine.run([doomed[0], *trials[1:4], doomed[1], trials[4]]), engine.run(trials)
    assert len(run.pack) == 4 and run.pack.loss_scale.scale.tolist() == [2.0**14, 3.0, 2.0**16, 1.0]
    for row, i in ((1, 1), (2, 2), (3, 3), (5, 4)):
        assert engine.same_bits(run[row], reference[i]) == []


def test_a_pack_without_scaling_does_nothing_for_it():
    pack = engine.pack_of([engine.trial(**NOTHING)] * 2)
    assert not pack.loss_scale.is_on and not pack.loss_scale.is_dynamic
    assert not engine.pack_of([engine.trial(), engine.trial(loss_scaling="static")]).loss_scale.is_dynamic


def test_a_dynamic_scale_starts_where_it_may_stay():
    too_low = engine.trial(**DYNAMIC, loss_scale=SMALLEST_SCALE / 2)
    with pytest.raises(ConfigError, match="train.loss_scale=2.98.*: below 5.96.*allowed: 5.96"):
        check_trial(too_low)
    check_trial(engine.trial(**DYNAMIC, loss_scale=SMALLEST_SCALE))
    check_trial(engine.trial(loss_scaling="static", loss_scale=SMALLEST_SCALE / 2))
