"""Every promise of the architecture, while sequences and batches grow."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import Trial
from harness.objectives.outcome import NON_FINITE
from harness.training.contradictions import check_trial
from harness.training.sites import Site
from injectors.batch import RandomTokens
from injectors.value import Value
from tests.harness import engine
from tests.harness.test_curriculum import GROWTHS, growths
from tests.harness.test_promises import Change, fill_first

VICTIMS = {Site.WEIGHT: 2, Site.REDUCED_GRADIENT: 7}


def nine(growth: str) -> list[Trial]:
    """Two ruined ones are no quarter of them, so the pack does not shrink."""
    return engine.different(9, steps=5, validate_every=3, **GROWTHS[growth])


@cache
def plain_run(growth: str) -> engine.Run:
    """Trials that nothing happens to, looked at by several tests and changed by none."""
    return engine.run(nine(growth))


@cache
def struck_run(growth: str) -> engine.Run:
    """The same, in which each victim gets a NaN at its site in step 2."""
    strikes = {i: Change(site, range(2, 3), fill_first("head", math.nan)) for site, i in VICTIMS.items()}
    return engine.run(nine(growth), strikes)


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("shape", [{}, {"positions": "learned", "width": 24, "context": 12}])
def test_a_trial_does_not_depend_on_its_pack(growth, shape):
    fields = {"steps": 5, "validate_every": 3, **shape, **GROWTHS[growth]}
    trials = engine.different(7, **fields) if shape else nine(growth)
    together = engine.run(trials) if shape else plain_run(growth)
    assert together.signals["loss"].shape == (len(trials), trials[0].steps)
    for members in ([5, 3], [6, 2, 4]):
        apart = engine.run([trials[i] for i in members])
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} in a pack of {len(members)}"


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("site", VICTIMS)
def test_a_trial_full_of_nan_changes_no_bit_of_its_neighbours(growth, site):
    plain, struck, victim = plain_run(growth), struck_run(growth), VICTIMS[site]
    assert struck.result.outcome[victim] == NON_FINITE and struck.result.nonfinite_step[victim] == 2
    others = set(range(9)) - set(VICTIMS.values())
    assert [engine.same_bits(plain[i], struck[i]) for i in others] == [[]] * 7


@growths
def test_a_fork_equals_a_full_run(growth):
    """Strikes while sizes grow, when they have grown, and at a step that only the longer run has."""
    fields = {"steps": 12, **growth}
    last = engine.trial(**fields).steps - 1
    faults = [
        Value(start=2, tensor="head", bit=22),
        RandomTokens(start=3, duration=2),
        Value(start=8, tensor="blocks.1.feedforward.up", bit=21, site=Site.ACTIVATION),
        Value(start=last, tensor="head", bit=25),
    ]
    trials = [engine.trial(**fields), *(engine.trial(fault=fault, **fields) for fault in faults)]
    for trial in trials:
        check_trial(trial)
    forked, full = (engine.run(trials, forks=forks) for forks in (True, False))
    for i in range(len(trials)):
        assert engine.same_bits({**forked[i], "weights": torch.empty(0)}, {**full[i], "weights": torch.empty(0)}) == []
        assert forked.result.events[i] == full.result.events[i]
    assert all(forked.result.changes[1:])
    loss = torch.from_numpy(forked.signals["loss"])
    for i, fault in enumerate(faults, 1):  # twins up to the strike, and not after it
        assert torch.equal(engine.bits(loss[i, : fault.start]), engine.bits(loss[0, : fault.start]))
        assert fault.start == last or not torch.equal(loss[i, fault.start + 1 :], loss[0, fault.start + 1 :])


@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_ranks_make_no_difference_but_rounding(mode):
    growth = {"batch": 4, "batch_start": 2, "batch_steps": 1, "sequence_start": 2, "sequence_mode": mode}
    fields = {"precision": "fp64", **growth}
    one, two = (engine.run([engine.trial(seed=r, ranks=ranks, **fields) for r in range(2)]) for ranks in (1, 2))
    for name in ("loss", "grad_norm", "validation_loss", "tokens"):
        np.testing.assert_allclose(one.signals[name], two.signals[name], rtol=1e-9)


def test_activations_are_recomputed_alike_while_sequences_grow():
    """Checkpointing holds shapes of its own."""
    plain, again = (
        engine.run([engine.trial(seed=r, checkpointing=on, **GROWTHS["truncated"]) for r in range(2)])
        for on in (False, True)
    )
    assert [engine.same_bits(plain[i], again[i]) for i in range(2)] == [[], []]
