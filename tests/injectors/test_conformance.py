"""What docs/architecture.md promises, for every fault that there is: a new injector is tested as soon as it exists."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import NO_FAULT
from harness.loop import train
from harness.outcome import NON_FINITE
from harness.sites import Agenda
from injectors.replay import Replay, record_of
from tests.injectors.conftest import SHAPE, START, STEPS, cases, fault

CASES = cases()
every_fault = pytest.mark.parametrize("case", CASES)


def trial(engine, a_fault=NO_FAULT, **fields):
    return engine.trial(**{**SHAPE, "batch": 4, "steps": STEPS, "fault": a_fault, "seed": 7, **fields})


@cache
def healthy(engine, *seeds, **options):
    """Golden trials of these seeds, trained together: the same for every fault."""
    return engine.run([trial(engine, seed=seed) for seed in seeds], **options)


def signals(run, planned, steps=slice(None)):
    return {name: values[steps] for name, values in run[planned].items() if name != "weights"}


def test_there_are_as_many_as_the_folder_has():
    assert len(CASES) > 35 and {"weight_bit", "rare_tokens", "stale_gradient", "value at update"} <= set(CASES)


# --- 1: control equals nothing --------------------------------------------------------------------------------------


@every_fault
def test_one_that_is_never_due_changes_no_bit(engine, case):
    late = dataclasses.replace(fault(case), start=STEPS)
    golden = trial(engine)
    armed, plain = engine.run([trial(engine, late), golden, golden]), healthy(engine, 7, 7, 7)
    assert [engine.same_bits(armed[i], plain[i]) for i in range(3)] == [[], [], []]
    assert armed.result.events == [[], [], []] and armed.result.strikes == [0, 0, 0]


@every_fault
def test_one_that_lasts_past_the_end_lasts_to_the_end(engine, case):
    start = 4
    short, long, permanent = (
        engine.run([trial(engine, dataclasses.replace(fault(case), start=start, duration=duration)), trial(engine)])
        for duration in (STEPS - start, 999, None)
    )
    assert [engine.same_bits(short[i], long[i]) for i in range(2)] == [[], []]
    assert [engine.same_bits(short[i], permanent[i]) for i in range(2)] == [[], []]
    assert short.result.strikes == long.result.strikes == permanent.result.strikes


@every_fault
def test_its_period(engine, case):
    every_other = dataclasses.replace(fault(case), duration=4, period=2)
    run = engine.run([trial(engine, every_other), trial(engine)])
    steps = {event.step for event in run.result.events[0]}
    assert steps <= {START, START + 2} and START in steps


# --- 2 and 3: twins and isolation -----------------------------------------------------------------------------------


@every_fault
@pytest.mark.parametrize("forks", [False, True])
def test_twins_are_equal_up_to_the_strike_and_neighbours_throughout(engine, case, forks):
    faulty = trial(engine, fault(case))
    trials = [trial(engine, seed=1), faulty, faulty.golden, trial(engine, seed=2)]
    run = engine.run(trials, forks=forks)
    assert {event.step for event in run.result.events[1]} <= set(range(START, STEPS)), "a record of every strike"
    assert run.result.events[1][0].step == START and run.result.events[1][0].changed
    assert engine.same_bits(signals(run, 1, slice(START)), signals(run, 2, slice(START))) == []
    masked = run.result.masked_step[1]
    if masked is None:
        assert engine.same_bits(signals(run, 1, slice(START, None)), signals(run, 2, slice(START, None)))
    else:
        after = slice(masked + 1, None)
        assert engine.same_bits(signals(run, 1, after), signals(run, 2, after)) == []
    plain = healthy(engine, 1, 7, 7, 2)
    assert [engine.same_bits(run[i], plain[i]) for i in (0, 2, 3)] == [[], [], []]


@every_fault
def test_a_killed_pack_goes_on_bit_for_bit(engine, case, tmp_path):
    """Killed before the strike, between two of them, and when they are over."""
    faulty = trial(engine, dataclasses.replace(fault(case), duration=3))
    engine.assert_resumes([faulty, faulty.golden, trial(engine, seed=1)], tmp_path, [START, START + 1, START + 3])


RUINOUS = ("nan", "infinity", "minus_infinity", "scale")
ABSORBED = ("value at activation", "value at activation_gradient", "value at moment_1", "value at moment_2")
"""Sites at which an infinite value may leave weights and loss finite: behind a softmax, a norm or a quotient."""


@pytest.mark.parametrize("case", [case for case in CASES if " at " in case])
def test_what_is_not_finite_stays_in_its_trial(engine, case):
    ruinous = [dataclasses.replace(fault(case), model=model, value=1e30) for model in RUINOUS]
    trials = [trial(engine, seed=0), *(trial(engine, each, seed=1) for each in ruinous), trial(engine, seed=2)]
    run, plain = engine.run(trials), healthy(engine, 0, 1, 2)
    assert [engine.same_bits(run[i], plain[j]) for i, j in ((0, 0), (5, 2))] == [[], []]
    assert run.result.strikes == [0, 1, 1, 1, 1, 0]
    if case not in ABSORBED:
        assert run.result.outcome[1:4] == [NON_FINITE] * 3


@every_fault
def test_it_strikes_a_trial_that_is_not_finite(engine, case):
    """Without detection nothing freezes, and an injector has to take what it finds."""
    ruins = (math.nan, math.inf, -math.inf, 3e38)

    def ruin(pack):
        for row, value in enumerate(ruins, start=1):
            pack.weights[row] = value

    trials = [trial(engine), *(trial(engine, fault(case)) for _ in ruins)]
    run = engine.run(trials, prepare=ruin, detection=False)
    assert min(run.result.strikes[1:]) > 0
    assert engine.same_bits(run[0], healthy(engine, 7, 7, detection=False)[0]) == []


# --- 6: fork equals full run ----------------------------------------------------------------------------------------


@every_fault
def test_a_fork_equals_a_full_run(engine, case):
    """Three strikes at different steps share one prefix; rows come in the middle of a block."""
    faulty = [trial(engine, dataclasses.replace(fault(case), start=start)) for start in (2, 4, 5)]
    trials = [trial(engine), *faulty]
    forked, full = engine.run(trials, forks=True, block=3), engine.run(trials, block=3)
    assert forked.pack.twins.begins != full.pack.twins.begins, "some rows came later"
    for i in range(4):
        assert engine.same_bits(signals(forked, i), signals(full, i)) == []
        same = forked.weights[-1].get(i), full.weights[-1].get(i)
        assert None in same or torch.equal(engine.bits(same[0]), engine.bits(same[1]))
    for name in ("outcome", "nonfinite_step", "events", "strikes", "changes"):
        assert getattr(forked.result, name) == getattr(full.result, name), name
    if case != "duplicated_batch":  # it looks at an earlier batch, so its row is its own from then on
        assert forked.result.masked_step == full.result.masked_step


# --- 7: replay ------------------------------------------------------------------------------------------------------


def replayed(faulty, run, planned=0):
    events = [event.to_dict() for event in run.result.events[planned]]
    record = record_of(faulty.to_dict(), events, run.corpus.fingerprint)
    return dataclasses.replace(faulty, fault=Replay(record=json.dumps(record)).resolved())


@every_fault
def test_a_replay_is_the_same_run(engine, case):
    faulty = trial(engine, fault(case))
    first = engine.run([faulty, faulty.golden])
    again = engine.run([replayed(faulty, first), faulty.golden])
    assert engine.same_bits(first[0], again[0]) == []
    assert first.result.events == again.result.events


# --- 8: a fault that did nothing says so ----------------------------------------------------------------------------


@every_fault
def test_one_whose_trial_froze_before_never_fires(engine, case):
    for size in (2, 5):  # with and without a pack that shrinks
        doomed = trial(engine, fault(case), lr=1e30, warmup=0, clip=None)
        run = engine.run([trial(engine, seed=1 + r) for r in range(size - 1)] + [doomed])
        assert run.result.nonfinite_step[-1] < START
        assert run.result.events == [[]] * size and run.result.strikes[-1] == run.result.changes[-1] == 0


# --- 9: after a rollback --------------------------------------------------------------------------------------------


@every_fault
@pytest.mark.parametrize("permanent", [False, True])
def test_after_a_rollback_only_a_permanent_fault_strikes_again(engine, case, permanent):
    own = dataclasses.replace(fault(case), duration=None if permanent else 2)
    trials = [trial(engine, own), trial(engine)]
    agenda, pack, losses = Agenda([engine.injector_of(t) for t in trials]), engine.pack_of(trials), []

    def go(steps):
        train(pack, agenda, 100, lambda first, arrays: losses.append(arrays["loss"]), steps=steps)

    go(range(START))
    before = pack.snapshot()
    go(range(START, STEPS))
    first = list(agenda.events[0])
    pack.restore(before)
    agenda.roll_back(0, STEPS)
    go(range(START, STEPS))
    struck, again, golden = losses[1][0], losses[2][0], losses[2][1]
    if permanent:
        assert agenda.strikes[0] == 2 * len(first) or len(first) == 64
        assert np.array_equal(struck, again, equal_nan=True)
    else:
        assert agenda.events[0] == first, "nothing struck"
        assert np.array_equal(again, golden)
    assert np.array_equal(losses[1][1], golden), "the golden twin does the same again"
