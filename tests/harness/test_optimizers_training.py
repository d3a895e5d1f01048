"""Every optimizer in real packs: it trains, forks, is masked, goes back to a snapshot, and keeps its bits."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import Trial
from harness.optim.optimizers import OPTIMIZERS
from harness.training.loop import train
from harness.training.sites import Agenda, Site
from injectors.value import Value
from tests.harness import engine

every = pytest.mark.parametrize("name", OPTIMIZERS)
RATES = {"sgd": 0.1, "lars": 0.1, "lion": 5e-3, "lamb": 3e-2, "adafactor": 3e-2}
OPTIONS = {
    "spam": {"interval": 12, "warmup": 4, "grace": 3},
    "stable_spam": {"interval": 12},
    "adafactor": {"relative_step": True},
    "lars": {"trust": 1.0},
}


def trials_of(name, count, **fields):
    """Trials that differ; intervals are short, so that resets happen."""
    rate = RATES.get(name, 1e-2)
    own = [
        engine.trial(
            seed=r,
            name=name,
            lr=rate * (1 + 0.3 * r),
            **{"steps": 20, "vocabulary": 32, "depth": 1, "weight_decay": 1e-3 * r, **fields},
        )
        for r in range(count)
    ]
    if name not in OPTIONS:
        return own
    parts = [{part: getattr(trial, part) for part in ("model", "optim", "schedule", "train", "data")} for trial in own]
    options = type(own[0].section(name))(**OPTIONS[name])
    return [Trial.of({**part, name: options}, seed=trial.seed) for part, trial in zip(parts, own, strict=True)]


FIELDS = [{}, {"clip_update": 0.5}, {"decay_follows": "schedule"}, {"parametrization": "mup"}]
PACKS = [[FIELDS[0], FIELDS[2]], [FIELDS[1]], [FIELDS[3]]]  # those of one structure together


@cache
def trained(name, pack):
    """Three trials of each of the fields of a pack."""
    trials = [t for fields in PACKS[pack] for t in trials_of(name, 3, batch=8, base_width=8, **fields)]
    return engine.run(trials, block=5)


@every
@pytest.mark.parametrize("fields", FIELDS)
def test_it_trains(name, fields):
    (pack,) = [number for number, own in enumerate(PACKS) if fields in own]
    run, first = trained(name, pack), 3 * PACKS[pack].index(fields)
    own = slice(first, first + 3)
    loss = run.signals["loss"][own]
    assert run.result.nonfinite_step[own] == [None] * 3
    assert (loss[:, -5:].mean(1) < loss[:, 0] - 0.1).all(), loss[:, ::5]
    assert np.isfinite(run.signals["second_moment_norm"][own]).all() == ("moment_2" in OPTIMIZERS[name].slots)


@every
def test_bits_do_not_depend_on_the_pack(name):
    trials = trials_of(name, 7, width=48, head_dim=16, context=33, batch=3, steps=5)
    together = engine.run(trials)
    for members in ([5, 3], [6, 2, 4]):
        apart = engine.run([trials[i] for i in members])
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} in a pack of {len(members)}"


@cache
def forked_and_full(name):
    """Two golden trials; three faults of the first that last, one that changes nothing, one that is small."""
    golden = trials_of(name, 2, steps=16)
    lasting = Value(start=5, tensor="head", element=3, model="scale", value=2.0)
    nothing = Value(start=4, site=Site.REDUCED_GRADIENT, tensor="head", element=3, model="scale", value=1.0)
    faults = [dataclasses.replace(lasting, start=start) for start in (5, 11, 12)]
    faults += [nothing, dataclasses.replace(nothing, value=1.5)]
    trials = [*golden, *(dataclasses.replace(golden[0], fault=fault) for fault in faults)]
    return engine.run(trials, forks=True, block=3), engine.run(trials, block=3)


@every
def test_a_fork_equals_a_full_run(name):
    """Rows come in the middle of the run, with all that the optimizer knows."""
    forked, full = forked_and_full(name)
    assert forked.pack.twins.begins != full.pack.twins.begins, "some rows came later"
    assert [engine.same_bits(forked[i], full[i]) for i in range(5)] == [[]] * 5
    assert all(engine.same_bits(forked[0], forked[i]) for i in (2, 3, 4))


@every
def test_a_fault_that_the_state_forgets_is_masked(name):
    """A learning rate of zero takes nothing from the weights that a fault puts back: only what is the same is equal."""
    for run in forked_and_full(name):
        assert run.result.masked_step[:6] == [None, None, None, None, None, 4]
        if name != "lion":  # whose step is the sign alone, but whose momentum differs for some steps
            assert run.result.masked_step[6] is None


@every
def test_it_goes_back_to_a_snapshot(name):
    pack = engine.pack_of(trials_of(name, 3, steps=20))
    losses = []

    def go(steps):
        train(pack, Agenda([None] * 3), 100, lambda first, arrays: losses.append(arrays["loss"]), until=steps.stop)

    go(range(9))
    before = pack.snapshot()
    go(range(9, 16))
    weights = pack.weights.clone()
    pack.restore(before)
    go(range(9, 16))
    assert torch.equal(pack.weights, weights)
    assert np.array_equal(losses[1], losses[2])


def test_adafactor_that_is_relative_to_the_weights_has_the_rates_for_that():
    """muP's rates follow from what the size of an update follows (harness/model/scaling.py)."""
    plain = trials_of("adafactor", 2, parametrization="mup", base_width=4)
    options = [dataclasses.replace(trial.section("adafactor"), parameter_scale=True) for trial in plain]
    scaled = [
        dataclasses.replace(trial, extras=(("adafactor", own),)) for trial, own in zip(plain, options, strict=True)
    ]
    name = "blocks.0.attention.query"
    left, right = (engine.pack_of(trials).layout.by_name[name] for trials in (plain, scaled))
    assert (left.learning_rate, right.learning_rate) == (0.25, 0.5)
