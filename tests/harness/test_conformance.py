"""What docs/architecture.md promises, whatever a trial has: a setting in `FEATURES` is held to all of it.

The trials of a setting are trained once in each way; nothing here has a tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config import Trial
from harness.objectives.outcome import NON_FINITE
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.training.sites import Site
from injectors.batch import RandomTokens
from injectors.value import Value
from tests.harness import engine
from tests.harness.changes import Change, fill_first
from tests.harness.features import FEATURES, NEUTRAL, Fields
from tests.harness.variants import roughen

GOLDEN, BLOCK, SAVED = 5, 3, 5
# A thread's share of a pack ends inside a row of features, and of heads.
ODD = {"width": 24, "head_dim": 8, "context": 17, "batch": 3, "feedforward": 41, "vocabulary": 61}
ODD |= {"steps": 2, "validate_every": 2}
ODD_FUSED = {**ODD, "context": 33}  # with 17 torch's kernel rounds otherwise in a second thread
SMALL = {"width": 16, "head_dim": 8, "context": 8, "vocabulary": 64, "steps": 7}
SCALED = {"tensor": "embedding", "model": "scale", "site": "reduced_gradient", "elements": None}
FAULTS = [  # of the golden trials 0, 1, ..; the second one leaves all that remembers gradients another
    Value(start=3, tensor="blocks.0.feedforward.up", element=0, bit=23),
    Value(start=5, value=100.0, **SCALED),
    RandomTokens(start=2, duration=2),
    Value(start=4, tensor="embedding", model="round"),  # to fp32: it does nothing, and the trial is its twin again
]
IDLE = GOLDEN + 3
every = pytest.mark.parametrize("feature", FEATURES)


def trials_of(feature: str, **shape) -> list[Trial]:
    return engine.different(GOLDEN, **{"warmup": 1, **SMALL, **shape, **FEATURES[feature]})


@cache
def family(feature: str) -> list[Trial]:
    """Five golden trials, and four of them with a fault."""
    golden = trials_of(feature)
    return [*golden, *(replace(trial, fault=fault) for trial, fault in zip(golden, FAULTS, strict=False))]


@cache
def full(feature: str) -> engine.Run:
    """Every trial in a row of its own; looked at by several tests and changed by none."""
    return engine.run(family(feature), block=BLOCK, prepare=roughen)


@dataclass
class SavedOnce(Checkpoints):
    """The state before one step alone."""

    def is_due(self, step: int) -> bool:
        return step == SAVED


@every
def test_it_acts(feature: str) -> None:
    """Otherwise the rest would say little: each part of the recipe that can be idle is not, in one trial at least."""
    acts = full(feature).result.acts[:GOLDEN]
    parts = {part for counts in acts for part in counts}
    assert parts and all(any(counts.get(part) for counts in acts) for part in parts)


@every
def test_a_trial_does_not_depend_on_its_pack(feature: str) -> None:
    """Neither on its size nor on the place, with two threads; forks and ruined trials show it with one."""
    torch.set_num_threads(2)
    trials = trials_of(feature, **(ODD_FUSED if FEATURES[feature].get("attention") == "fused" else ODD))
    together = engine.run(trials, prepare=roughen)
    for members in ([3, 2], [4, 1, 0]):  # two threads share the middle one of an odd pack: not the same one in each
        apart = engine.run([trials[number] for number in members], prepare=roughen)
        engine.assert_same_trials(apart, together, dict(enumerate(members)))


RUINS = [
    Change(Site.WEIGHT, range(4, 5), fill_first("blocks.0.feedforward.up", math.nan)),
    Change(Site.WEIGHT, range(3, 4), lambda tensors: [x.fill_(3e38) for x in tensors.values()]),
    Change(Site.REDUCED_GRADIENT, range(4, 5), fill_first("embedding", math.nan)),
    Change(Site.REDUCED_GRADIENT, range(5, 6), fill_first("blocks.0.feedforward.up", -math.inf)),
    Change(Site.REDUCED_GRADIENT, range(4, 5), lambda tensors: [x.mul_(1e6) for x in tensors.values()]),
]


WAYS = {(True, True): 1, (False, False): 2, (True, False): 4}  # telemetry and detection -> one feature in so many


@pytest.mark.parametrize(
    ("feature", "telemetry", "detection"),
    [(feature, *way) for way, share in WAYS.items() for feature in list(FEATURES)[::share]],
)
def test_ruined_trials_and_ways_of_training_change_no_bit_of_the_others(
    feature: str, telemetry: bool, detection: bool
) -> None:
    """Behind each golden trial stands one that is ruined in its way.

    Without detection nobody finds out, and all stay to the end. Where nothing is measured, blocks are recomputed.
    """
    trials, golden = family(feature), trials_of(feature)
    beside = [each for pair in zip(golden, reversed(golden), strict=True) for each in pair] + trials[GOLDEN:]
    beside = [replace(each, train=replace(each.train, checkpointing=not telemetry)) for each in beside]
    strikes = {2 * number + 1: ruin for number, ruin in enumerate(RUINS)}
    ruined = engine.run(beside, strikes, roughen, BLOCK, telemetry=telemetry, detection=detection)
    places = {n: 2 * n if n < GOLDEN else GOLDEN + n for n in range(len(trials))}
    engine.assert_same_trials(full(feature), ruined, places, None if telemetry else ["loss", "weights"])
    # The fifth is clipped, or has the signs that it had; of clip_value's trial the fourth's element is at its bound.
    for number in range(3 if feature == "clips: clip_value" else 4):
        losses = ruined.signals["loss"][2 * number + 1], full(feature).signals["loss"][GOLDEN - 1 - number]
        assert not np.array_equal(*losses, equal_nan=True), f"ruin {number} has ruined nothing"
    assert ruined.result.nonfinite_step[1] == (4 if detection else None)
    assert not detection or ruined.result.outcome[1] == ruined.result.outcome[3] == NON_FINITE
    assert not detection or ruined.result.provenance[1]["blamed"] == "blocks.0.feedforward.up"


@every
def test_a_fork_equals_a_full_run_and_goes_on_from_a_checkpoint(feature: str, tmp_path: Path) -> None:
    """The checkpoint has a fork behind it and one before it, and a trial that was its twin again.

    And its blocks are computed again on the way back, which changes no bit, whatever is measured.
    """
    whole, checkpoints = full(feature), SavedOnce(ResultsPath.at(tmp_path))
    trials = [replace(trial, train=replace(trial.train, checkpointing=True)) for trial in family(feature)]
    forked = engine.assert_fork_equals_full_run(trials, whole, prepare=roughen, block=BLOCK, checkpoints=checkpoints)
    assert forked.pack.twins.begins[GOLDEN:] == [fault.start for fault in FAULTS]
    assert all(forked.result.changes[GOLDEN:-1])
    assert forked.result.masked_step == [4 if number == IDLE else None for number in range(len(trials))]
    for row, number in enumerate(forked.pack.rows):
        if number in whole.pack.rows:
            states = [
                {name: values[at] for name, values in run.pack.rows_state}
                for run, at in ((forked, row), (whole, whole.pack.rows.index(number)))
            ]
            assert engine.same_bits(*states) == [], f"trial {number}"
    resumed = engine.resumed(trials, tmp_path, [], BLOCK, forks=True)
    engine.assert_same_end(resumed, forked, SAVED // BLOCK * BLOCK)


@pytest.mark.parametrize(("fields", "plain"), NEUTRAL.values(), ids=NEUTRAL)
def test_a_setting_of_no_strength_changes_no_bit(fields: Fields, plain: Fields) -> None:
    engine.assert_same_trials(*(engine.run(engine.different(3, **each)) for each in (fields, plain)))
