"""The promises of docs/architecture.md for every variant of the model, in bits, and settings that change nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import Trial
from harness.objectives.outcome import NON_FINITE
from injectors.value import Value
from tests.harness import engine
from tests.harness.variants import VARIANTS, different, roughen, with_fields

# A thread's share of a pack ends inside a row of features, and of heads.
ODD = {"width": 24, "head_dim": 8, "context": 17, "batch": 3, "feedforward": 41, "vocabulary": 61}
VICTIM = 2
STRUCK = 5


@cache
def golden_and_struck(variant: str) -> tuple[Trial, ...]:
    """Five trials, and the first of them with a fault, which is trial STRUCK."""
    golden = different(variant, STRUCK, steps=4)
    fault = Value(start=2, tensor="blocks.1.feedforward.up", element=0, bit=23)
    return (*golden, replace(golden[0], fault=fault))


@cache
def plain_run(variant: str) -> engine.Run:
    """What these trials leave, looked at by several tests and changed by none."""
    return engine.run(golden_and_struck(variant), prepare=roughen)


@cache
def at_full_precision(variant: str) -> engine.Run:
    """Two trials that are not roughened."""
    return engine.run(different(variant, 2, steps=3))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trial_does_not_depend_on_its_pack(variant, threads):
    torch.set_num_threads(threads)
    trials = different(variant, 5, steps=2, validate_every=2, **ODD)
    together = engine.run(trials, prepare=roughen)
    for members in ([3, 2], [4, 1, 0]):  # two threads share the middle one of an odd pack: not the same one in each
        apart = engine.run([trials[i] for i in members], prepare=roughen)
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} in a pack of {len(members)}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trial_full_of_nan_changes_no_bit_of_its_neighbours(variant):
    def poison(pack):
        roughen(pack)
        pack.weights[VICTIM] = math.nan

    healthy, run = plain_run(variant), engine.run(golden_and_struck(variant), prepare=poison)
    assert run.result.outcome[VICTIM] == NON_FINITE and len(run.pack) == STRUCK + 1
    for i in {0, 1, 3, 4, STRUCK}:
        assert engine.same_bits(run[i], healthy[i]) == []
        assert run.result.outcome[i] != NON_FINITE


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fork_equals_a_full_run(variant):
    """Whatever a variant keeps from step to step is copied with the row."""
    full, forked = plain_run(variant), engine.run(golden_and_struck(variant), forks=True, prepare=roughen)
    assert [engine.same_bits(forked[i], full[i]) for i in range(STRUCK)] == [[]] * STRUCK
    assert not np.array_equal(full.signals["loss"][0], full.signals["loss"][STRUCK])
    np.testing.assert_array_equal(forked.signals["loss"][STRUCK], full.signals["loss"][STRUCK])


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointing_changes_no_bit(variant):
    kept = plain_run(variant)
    trials = [replace(t, train=replace(t.train, checkpointing=True)) for t in golden_and_struck(variant)]
    computed_again = engine.run(trials, prepare=roughen)
    assert [engine.same_bits(kept[i], computed_again[i]) for i in range(len(trials))] == [[]] * len(trials)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_stays_near_full_precision(variant, precision):
    """Rounding at 2^-8 (bf16) or 2^-3 (fp8) of each product: the loss of a few steps hardly moves."""
    trials = different(variant, 2, steps=3)
    half = [replace(t, train=replace(t.train, precision=precision)) for t in trials]
    full, rounded = at_full_precision(variant), engine.run(half)
    assert not np.array_equal(full.signals["loss"], rounded.signals["loss"])
    np.testing.assert_allclose(rounded.signals["loss"], full.signals["loss"], atol=0.2)


# --- settings that change nothing -------------------------------------------------------------------------------------

NOTHING = {
    "a clamp that nothing reaches": (
        {"activation": "swiglu", "expansion": 4, "swiglu_clamp": 1e30},
        {"activation": "swiglu", "expansion": 4},
    ),
    "no block of Mix-LN is post-LN": ({"placement": "mix", "mix": 0.0}, {"placement": "pre"}),
    "every block of Mix-LN is post-LN": ({"placement": "mix", "mix": 1.0}, {"placement": "post"}),
    "post-LN has no norm in front": ({"placement": "post", "attention_norm": False}, {"placement": "post"}),
}


@pytest.mark.parametrize(("fields", "same_as"), NOTHING.values(), ids=NOTHING)
def test_a_setting_of_no_strength_changes_no_bit(fields, same_as):
    trials = engine.different(3)
    left, right = (engine.run(with_fields(trials, f)) for f in (fields, same_as))
    assert [engine.same_bits(left[i], right[i]) for i in range(3)] == [[], [], []]


def losses(pack, step):
    pack.begin(step)
    with torch.no_grad():
        return pack.loss(pack.objective.batch(0))


def test_layer_scale_of_one_is_the_plain_model():
    """Forward alone: in training the gains learn."""
    trials = engine.different(3)
    plain, scaled = engine.pack_of(trials), engine.pack_of(with_fields(trials, {"layer_scale": 1.0}))
    assert torch.equal(engine.bits(losses(plain, 0)), engine.bits(losses(scaled, 0)))
    halved = engine.pack_of(with_fields(trials, {"layer_scale": 0.5}))
    assert not (losses(plain, 0) == losses(halved, 0)).any()


def test_branchnorm_that_has_grown_is_post_ln():
    trials = engine.different(3)
    post = engine.pack_of(with_fields(trials, {"placement": "post"}))
    grows = engine.pack_of(with_fields(trials, {"placement": "branchnorm", "branch_steps": (4, 9, 5)}))
    for step, grown in ((0, [False] * 3), (3, [False] * 3), (4, [True, False, False]), (5, [True, False, True])):
        assert (engine.bits(losses(grows, step)) == engine.bits(losses(post, step))).tolist() == grown
    assert torch.equal(losses(grows, 9), losses(post, 9)) and torch.equal(losses(grows, 10**6), losses(post, 0))
