"""A loss scale belongs to its trial: it is nobody else's, and goes along in forks, shrinking packs and snapshots."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from harness.training.loop import train
from harness.training.sites import Agenda
from injectors.value import Value
from tests.harness import engine
from tests.harness.test_loss_scale import DYNAMIC, NOTHING, fault_at_scale, scales


def mixed(**fields):
    """Five trials, each scaling in its own way; the first overflows at the start in fp16."""
    ways = [
        {**DYNAMIC, "loss_scale": 2.0**26, "loss_scale_growth": 2},
        {**DYNAMIC, "loss_scale": 1024.0, "loss_scale_growth": 3},
        {"loss_scaling": "static", "loss_scale": 3.0},
        {"loss_scaling": "static"},
        NOTHING,
    ]
    return [engine.trial(seed=r, **way, **fields) for r, way in enumerate(ways)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_trials_that_scale_differently_do_not_influence_each_other(precision, clip):
    trials = mixed(precision=precision, clip=clip, steps=8)
    together = engine.run(trials)
    for members in ([0, 4], [4, 3], [1, 2], [4, 4]):
        apart = engine.run([trials[i] for i in members])
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} beside {members}"
    assert (scales(together)[0] > scales(together)[-1]) == (precision == "fp16")
    order = [0, 1, 2, 3, 4] * 3 + [4, 3, 2, 1, 0]
    in_parts = engine.run([trials[i] for i in order])
    assert len(in_parts.pack.parts) > 1, "rows pass through the model in parts"
    assert [engine.same_bits(in_parts[row], together[i]) for row, i in enumerate(order)] == [[]] * 20


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_fork_takes_the_scale_along(precision):
    golden = mixed(precision=precision, steps=12)
    faulty = [
        dataclasses.replace(t, fault=Value(start=5, site="reduced_gradient", model="infinity", tensor="head", seed=1))
        for t in golden
    ] + [dataclasses.replace(golden[1], fault=fault_at_scale(start=7, value=2.0))]
    trials = [*golden, *faulty]
    forked, full = engine.run(trials, forks=True, block=4), engine.run(trials, block=4)
    for i in range(len(trials)):
        left, right = ({k: v for k, v in run[i].items() if k != "weights"} for run in (forked, full))
        assert engine.same_bits(left, right) == [], i
    assert forked.result == full.result
    assert forked.result.nonfinite_step[5:] == [None, None, 5, 5, 5, None]


def test_a_pack_that_shrinks_keeps_the_scales():
    trials = mixed(steps=12)
    doomed = [dataclasses.replace(t, optim=dataclasses.replace(t.optim, lr=1e30)) for t in trials[:2]]
    run, reference = engine.run([doomed[0], *trials[1:4], doomed[1], trials[4]]), engine.run(trials)
    assert len(run.pack) == 4 and run.pack.loss_scale.scale.tolist() == [2.0**14, 3.0, 2.0**16, 1.0]
    for row, i in ((1, 1), (2, 2), (3, 3), (5, 4)):
        assert engine.same_bits(run[row], reference[i]) == []


def test_a_snapshot_holds_the_scales():
    trials = mixed(precision="fp16", steps=12)
    pack, agenda, found = engine.pack_of(trials), Agenda([None] * 5), []

    def go(steps):
        train(pack, agenda, 100, lambda first, arrays: found.append(arrays), until=steps.stop)
        return pack.weights.clone(), pack.loss_scale.scale.clone(), pack.loss_scale.clean.clone()

    go(range(5))
    before = pack.snapshot()
    first = go(range(5, 12))
    pack.restore(before)
    again = go(range(5, 12))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for name in ("loss", "loss_scale", "grad_norm"):
        assert np.array_equal(found[1][name], found[2][name], equal_nan=True)
    assert not np.array_equal(found[0]["loss_scale"][:, 0], found[1]["loss_scale"][:, 0])


@pytest.mark.parametrize(("value", "more_clean", "masked"), [(1.0, 0, 3), (2.0, 0, None), (1.0, 1, None)])
def test_another_scale_is_another_state(value, more_clean, masked):
    """Twice the scale changes no weight, but the trial is its twin again only if its scale and what that awaits are."""

    def prepare(pack):
        pack.loss_scale.clean[0] += more_clean

    faulty = engine.trial(fault=fault_at_scale(value=value), **DYNAMIC)
    run = engine.run([faulty, faulty.golden], prepare=prepare)
    assert np.array_equal(run.signals["loss"][0], run.signals["loss"][1])
    assert run.result.masked_step == [masked, None]
