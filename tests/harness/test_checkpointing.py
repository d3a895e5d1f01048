"""Activation checkpointing: less is kept, all else is equal, and what is computed again is neither read nor struck."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from harness.testing import engine
from injectors.batch import RandomTokens
from injectors.value import Value
from sweeps.planning.planner import activation_elements

# What one block hands to the next, and what is only added to it: nothing that is computed again depends on them.
KEPT = ("embedding", "blocks.0.feedforward.down", "blocks.0.residual", "head.input", "logits")
COMPUTED_AGAIN = (
    "blocks.1.attention.input",
    "blocks.1.attention.value",
    "blocks.1.attention.scores",
    "blocks.0.attention.projection",
    "blocks.1.feedforward.up",
)


def both(trials, **options):
    """The same trials without checkpointing and with it."""
    checkpointed = [replace(trial, train=replace(trial.train, checkpointing=True)) for trial in trials]
    return engine.run(trials, **options), engine.run(checkpointed, **options)


def assert_same(plain, checkpointed, trials):
    assert [engine.same_bits(plain[i], checkpointed[i]) for i in trials] == [[]] * len(trials)


# --- the same bits --------------------------------------------------------------------------------------------------


def test_it_changes_no_bit_where_rows_pass_in_parts_and_validation_comes_between():
    trials = engine.different(12, steps=12, validate_every=1)
    plain, checkpointed = both(trials)
    assert_same(plain, checkpointed, range(12))
    first, last = plain.signals["validation_loss"][:3, [0, -1]].T
    assert len(plain.pack.parts) > 1 and (last < first).all(), "they train"


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_inside_a_block_are_not_kept(checkpointing):
    """Between the forward and the backward pass: what gelu reads is gone, what a block reads is there."""
    pack = engine.pack_of([engine.trial(seed=r, checkpointing=checkpointing) for r in range(2)])
    kept = {}
    for name in ("blocks.*.feedforward.up", "blocks.0.residual"):
        pack.model.taps.attach(name, lambda name, x: kept.update({name: weakref.ref(x)}))
    loss = pack.loss(pack.objective.batch(0))
    alive = {name for name, x in kept.items() if x() is not None}
    inside = set() if checkpointing else {"blocks.0.feedforward.up", "blocks.1.feedforward.up"}
    assert alive == {"blocks.0.residual", *inside}
    loss.sum().backward()
    assert all(x() is None for name, x in kept.items() if name.endswith("up"))


def test_plans_know_what_is_kept():
    """Of five blocks, the input of each, and three times the inside of one: values, gradients, room between them."""
    model = engine.trial(depth=5).model
    plain, checkpointed = (activation_elements(model, 64, checkpointing) for checkpointing in (False, True))
    one_block = (plain - activation_elements(replace(model, depth=1), 64, False)) / 4
    assert checkpointed == plain - 2 * one_block + 5 * model.width


# --- taps and faults ------------------------------------------------------------------------------------------------


def test_taps_are_read_once_a_step():
    seen = {}
    for checkpointing in (False, True):
        pack = engine.pack_of([engine.trial(seed=r, checkpointing=checkpointing) for r in range(2)])
        calls = seen[checkpointing] = []
        pack.model.taps.attach("*", lambda name, x, calls=calls: calls.append((name, x.detach().clone())))
        pack.learn(pack.objective.batch(0))
        assert "embedding" in pack.model.taps, "still attached afterwards"
    for (name, x), (again, y) in zip(*seen.values(), strict=True):
        assert name == again and torch.equal(x, y)


SITES = [
    ("weight", "blocks.1.feedforward.up"),
    ("learning_rate", "*"),
    ("loss_scale", "*"),
    ("gradient", "blocks.0.attention.query"),
    ("reduced_gradient", "head"),
    ("clipped_gradient", "head"),
    ("moment_1", "blocks.1.feedforward.up"),
    ("moment_2", "head"),
    ("update", "blocks.0.attention.key"),
    *(("activation", name) for name in KEPT),
    *(("activation_gradient", name) for name in (*KEPT, *COMPUTED_AGAIN)),
]
FAULTS = {
    f"{site} {tensor}": Value(start=3, site=site, tensor=tensor, model="scale", value=3.0, elements=None, duration=2)
    for site, tensor in SITES
}
FAULTS["batch"] = RandomTokens(start=3)


INSIDE = [
    Value(start=3, site="activation", tensor=tensor, model="set", value=2.0, elements=None) for tensor in COMPUTED_AGAIN
]
GOLDEN = 3
ROWS = {name: GOLDEN + i for i, name in enumerate([*FAULTS, *COMPUTED_AGAIN])}


@cache
def struck():
    """All of these faults in one pack, each of its own copy of trial 1; without checkpointing, and with it."""
    golden = engine.different(GOLDEN, loss_scaling="static", loss_scale=64.0, ranks=2, batch=4)
    faulty = [replace(golden[1], fault=fault) for fault in (*FAULTS.values(), *INSIDE)]
    return both([*golden, *faulty])


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_do_the_same_bit_for_bit(fault):
    (plain, checkpointed), i = struck(), ROWS[fault]
    assert_same(plain, checkpointed, (*range(GOLDEN), i))
    assert plain.result.events[i] == checkpointed.result.events[i] != []
    assert plain.result.changes[i] > 0 and engine.same_bits(plain[1], plain[i])


@pytest.mark.parametrize("tensor", COMPUTED_AGAIN)
def test_a_fault_inside_a_block_is_gone_when_the_block_is_computed_again(tensor):
    """The loss of its step is that of any other run; gradients inside the block are not."""
    (plain, checkpointed), i = struck(), ROWS[tensor]
    assert_same(plain, checkpointed, range(GOLDEN))
    assert plain.result.events[i] == checkpointed.result.events[i] != []
    for name in ("loss", "activation_rms", "attention_logit_max"):
        assert (plain.signals[name][i, :4] == checkpointed.signals[name][i, :4]).all(), name
    assert plain.signals["loss"][i, 3] != plain.signals["loss"][1, 3]
    assert plain.signals["grad_norm"][i, 3] != checkpointed.signals["grad_norm"][i, 3]


def test_gradients_are_those_of_activations_computed_again():
    """`up` is struck: what the next matrix learns from is the activation without the strike."""
    pack = engine.pack_of([engine.trial(seed=r, checkpointing=True) for r in range(2)])
    up, dy = [], []

    def strike(_, x):
        up.append(x.detach().clone())
        x.data[0] += 1.0

    pack.model.taps.attach("blocks.1.feedforward.up", strike)
    pack.model.taps.attach("blocks.1.feedforward.down", lambda _, x: x.register_hook(dy.append) and None)
    pack.learn(pack.objective.batch(0))
    found = pack.layout.view(pack.gradients, "blocks.1.feedforward.down")
    torch.testing.assert_close(found, torch.bmm(dy[0].mT, F.gelu(up[0])))
    struck = torch.bmm(dy[0].mT, F.gelu(up[0] + 1.0))
    assert not torch.allclose(found[0], struck[0], rtol=0.1)
