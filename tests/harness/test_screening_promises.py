"""The promises of the whole project hold while batches are screened."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import Screen
from harness.objectives.outcome import NON_FINITE
from harness.training.sites import Site
from injectors.batch import RandomTokens, RareTokens
from injectors.value import Value
from tests.harness import engine
from tests.harness.test_promises import Change, fill_first
from tests.harness.test_screening import THRESHOLDS

SCREENS = {
    "all three": {"batch": 4, **THRESHOLDS},
    "ranks": {"batch": 6, "ranks": 3, "rarity": 3.7},
    "sequences grow": {"batch": 4, "rarity": 3.7, "sequence_start": 2, "sequence_steps": 5},
    "pieces": {"batch": 4, "entropy": 1.8, "sequence_start": 2, "sequence_steps": 5, "sequence_mode": "reshape"},
    "batches grow": {"batch": 4, "repetition": 0.05, "batch_start": 1, "batch_steps": 5},
}


def screened(count, fields):
    """Trials that differ in everything, thresholds too."""
    found = []
    for number, trial in enumerate(engine.different(count, **fields)):
        limits = {name: limit * (1 + 0.01 * number) for name, limit in vars(trial.screen).items() if limit}
        found.append(dataclasses.replace(trial, screen=Screen(**limits)))
    return found


VICTIMS = {Site.WEIGHT: 2, Site.REDUCED_GRADIENT: 7}


def nine(screen):
    """Two ruined ones are no quarter of them, so the pack does not shrink."""
    return screened(9, SCREENS[screen])


@cache
def plain_run(screen):
    """What they leave on one thread, looked at by several tests and changed by none."""
    return engine.run(nine(screen))


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_trial_does_not_depend_on_its_pack(screen, threads):
    torch.set_num_threads(threads)
    trials = nine(screen)
    together = plain_run(screen) if threads == 1 else engine.run(trials)
    assert (np.nansum(together.signals["dropped"], axis=1) > 0).sum() > 4
    for members in ([5, 3], [6, 2, 4]):
        apart = engine.run([trials[i] for i in members])
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} in a pack of {len(members)}"
            assert apart.result.dropped[row] == together.result.dropped[i]


@pytest.mark.parametrize("screen", SCREENS)
def test_a_trial_full_of_nan_changes_no_bit_of_its_neighbours(screen):
    plain = plain_run(screen)
    strikes = {i: Change(site, range(2, 3), fill_first("head", math.nan)) for site, i in VICTIMS.items()}
    struck = engine.run(nine(screen), strikes)
    assert [struck.result.outcome[i] for i in VICTIMS.values()] == [NON_FINITE] * 2
    others = set(range(9)) - set(VICTIMS.values())
    assert [engine.same_bits(plain[i], struck[i]) for i in others] == [[]] * 7


FAULTS = [
    RareTokens(start=3, duration=2),
    RandomTokens(start=5, duration=1, share=0.5),
    Value(start=4, tensor="head", bit=22),
    Value(start=4, tensor="head", model="round"),  # to fp32: it does nothing, and the row goes again
]


def family(screen):
    golden = engine.trial(**SCREENS[screen])
    return [golden, *(dataclasses.replace(golden, fault=fault) for fault in FAULTS)]


@cache
def full_run(screen):
    """Each trial with a row of its own, whatever it does."""
    return engine.run(family(screen))


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("block", [1, 3])
def test_a_fork_equals_a_full_run_and_twins_are_equal_up_to_the_strike(screen, block):
    """What was dropped before the strike is in the record of both, though they shared a row."""
    forked, full = engine.run(family(screen), forks=True, block=block), full_run(screen)
    assert forked.result.masked_step == full.result.masked_step == [None] * 4 + [4]
    for i in range(len(FAULTS) + 1):
        left, right = ({**run[i], "weights": torch.empty(0)} for run in (forked, full))
        assert engine.same_bits(left, right) == []
        assert forked.result.dropped[i] == full.result.dropped[i]
        counted = np.nansum(forked.signals["dropped"][i])
        assert len({(r["step"], r["sequence"]) for r in forked.result.dropped[i]}) == counted > 0
    for i, fault in enumerate(FAULTS, 1):
        left, right = (
            {name: full[n][name][: fault.start] for name in ("loss", "dropped", "grad_norm")} for n in (0, i)
        )
        assert engine.same_bits(left, right) == []
    assert full.result.dropped[4] == full.result.dropped[0] != full.result.dropped[1]
