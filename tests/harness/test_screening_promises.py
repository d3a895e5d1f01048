"""The promises of the whole project hold while batches are screened."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from harness.config import Screen
from harness.outcome import NON_FINITE
from harness.sites import Site
from injectors.batch import RandomTokens, RareTokens
from injectors.value import Value
from tests.harness.test_promises import Change, fill_first
from tests.harness.test_screening import THRESHOLDS

SCREENS = {
    "all three": {"batch": 4, **THRESHOLDS},
    "ranks": {"batch": 6, "ranks": 3, "rarity": 3.7},
    "sequences grow": {"batch": 4, "rarity": 3.7, "sequence_start": 2, "sequence_steps": 5},
    "pieces": {"batch": 4, "entropy": 1.8, "sequence_start": 2, "sequence_steps": 5, "sequence_mode": "reshape"},
    "batches grow": {"batch": 4, "repetition": 0.05, "batch_start": 1, "batch_steps": 5},
}
screens = pytest.mark.parametrize("fields", SCREENS.values(), ids=SCREENS)


def screened(engine, count, fields):
    """Trials that differ in everything, thresholds too."""
    found = []
    for number, trial in enumerate(engine.different(count, **fields)):
        limits = {name: limit * (1 + 0.01 * number) for name, limit in vars(trial.screen).items() if limit}
        found.append(dataclasses.replace(trial, screen=Screen(**limits)))
    return found


@screens
@pytest.mark.parametrize("threads", [1, 2])
def test_a_trial_does_not_depend_on_its_pack(engine, fields, threads):
    torch.set_num_threads(threads)
    trials = screened(engine, 7, fields)
    together = engine.run(trials)
    assert (np.nansum(together.signals["dropped"], axis=1) > 0).sum() > 4
    for members in ([5, 3], [6, 2, 4]):
        apart = engine.run([trials[i] for i in members])
        for row, i in enumerate(members):
            assert engine.same_bits(apart[row], together[i]) == [], f"trial {i} in a pack of {len(members)}"
            assert apart.result.dropped[row] == together.result.dropped[i]


@screens
def test_a_trial_full_of_nan_changes_no_bit_of_its_neighbours(engine, fields):
    trials = screened(engine, 5, fields)
    plain = engine.run(trials)
    for site in (Site.WEIGHT, Site.REDUCED_GRADIENT):
        struck = engine.run(trials, {2: Change(site, range(2, 3), fill_first("head", math.nan))})
        assert struck.result.outcome[2] == NON_FINITE
        assert [engine.same_bits(plain[i], struck[i]) for i in (0, 1, 3, 4)] == [[]] * 4


@screens
@pytest.mark.parametrize("block", [1, 3])
def test_a_fork_equals_a_full_run_and_twins_are_equal_up_to_the_strike(engine, fields, block):
    """What was dropped before the strike is in the record of both, though they shared a row."""
    faults = [
        RareTokens(start=3, duration=2),
        RandomTokens(start=5, duration=1, share=0.5),
        Value(start=4, tensor="head", bit=22),
        Value(start=4, tensor="head", model="round"),  # to fp32: it does nothing, and the row goes again
    ]
    trials = [engine.trial(**fields), *(engine.trial(fault=fault, **fields) for fault in faults)]
    forked, full = (engine.run(trials, forks=forks, block=block) for forks in (True, False))
    assert forked.result.masked_step == full.result.masked_step == [None] * 4 + [4]
    for i in range(len(trials)):
        left, right = ({**run[i], "weights": torch.empty(0)} for run in (forked, full))
        assert engine.same_bits(left, right) == []
        assert forked.result.dropped[i] == full.result.dropped[i]
        counted = np.nansum(forked.signals["dropped"][i])
        assert len({(r["step"], r["sequence"]) for r in forked.result.dropped[i]}) == counted > 0
    for i, fault in enumerate(faults, 1):
        left, right = (
            {name: full[n][name][: fault.start] for name in ("loss", "dropped", "grad_norm")} for n in (0, i)
        )
        assert engine.same_bits(left, right) == []
    assert full.result.dropped[4] == full.result.dropped[0] != full.result.dropped[1]
