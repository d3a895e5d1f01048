"""Variants of the model in half precision, and strengths at which they are another one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from harness.testing import engine
from tests.harness.variants import VARIANTS, different, with_fields


@cache
def at_full_precision(variant: str) -> engine.Run:
    """Two trials that are not roughened."""
    return engine.run(different(variant, 2, steps=3))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_stays_near_full_precision(variant, precision):
    """Rounding at 2^-8 (bf16) or 2^-3 (fp8) of each product: the loss of a few steps hardly moves."""
    trials = different(variant, 2, steps=3)
    half = [replace(t, train=replace(t.train, precision=precision)) for t in trials]
    full, rounded = at_full_precision(variant), engine.run(half)
    assert not np.array_equal(full.signals["loss"], rounded.signals["loss"])
    np.testing.assert_allclose(rounded.signals["loss"], full.signals["loss"], atol=0.2)


# --- strengths that mean nothing --------------------------------------------------------------------------------------


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
