"""What docs/architecture.md promises, for every fault that there is: a new injector is tested as soon as it exists.

All of them are trials of one pack, which is trained once for each promise; the tests look at one of them each. The
promises themselves stand in harness/testing/faults.py, for faults of plug-ins too.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest

from harness.objectives.outcome import NON_FINITE
from harness.testing import engine
from harness.testing.faults import FaultPromises, train_told
from injectors.replay import Replay, record_of
from tests.injectors.faults import SITES, cases, fault

CASES = cases()
NUMBER = {case: number for number, case in enumerate(CASES)}
PROMISES = FaultPromises(CASES, fault)
trial, healthy, between_neighbours = PROMISES.trial, PROMISES.healthy, PROMISES.between_neighbours
every_fault = pytest.mark.parametrize("case", CASES)


def test_there_are_as_many_as_the_folder_has():
    assert len(CASES) > 35 and {"weight_bit", "rare_tokens", "stale_gradient", "value at update"} <= set(CASES)


@pytest.mark.parametrize("promise", FaultPromises.names())
@every_fault
def test_each_promise(case, promise):
    PROMISES.check(promise, case)


RUINOUS = ("nan", "infinity", "minus_infinity", "scale")
ABSORBED = ("activation", "activation_gradient", "moment_1", "moment_2")
"""Sites at which an infinite value may leave weights and loss finite: behind a softmax, a norm or a quotient."""


@cache
def ruined():
    """Four ruinous faults at each site, between golden trials of seeds 0 and 2: trial 5 n is that before site n."""
    trials = [trial(seed=0)]
    for number, site in enumerate(SITES):
        ruinous = [dataclasses.replace(fault(f"value at {site}"), model=model, value=1e30) for model in RUINOUS]
        trials += [*(trial(each, seed=1) for each in ruinous), trial(seed=(2, 0)[number % 2])]
    return train_told(trials, block=1)


@pytest.mark.parametrize("site", SITES)
def test_what_is_not_finite_stays_in_its_trial(site):
    found, plain, first = ruined(), healthy(0, 2), 5 * list(SITES).index(site)
    for neighbour in (first, first + 5):
        assert engine.same_bits(found[neighbour], plain[neighbour % 2]) == []
    assert found.result.strikes[first : first + 6] == [0, 1, 1, 1, 1, 0]
    if site not in ABSORBED:
        assert found.result.outcome[first + 1 : first + 4] == [NON_FINITE] * 3


# --- replay ---------------------------------------------------------------------------------------------------------


def replayed(faulty, found, planned):
    events = [event.to_dict() for event in found.result.events[planned]]
    record = record_of(faulty.to_dict(), events, found.corpus.fingerprint)
    return dataclasses.replace(faulty, fault=Replay(record=json.dumps(record)).resolved())


@cache
def replays():
    """What each case did between its neighbours again, the last case first."""
    first = between_neighbours()
    again = [replayed(trial(fault(case)), first, 2 * NUMBER[case] + 1) for case in reversed(CASES)]
    return train_told([*again, trial()], block=8)


@every_fault
def test_a_replay_is_the_same_run(case):
    first, again = between_neighbours(), replays()
    before, now = 2 * NUMBER[case] + 1, len(CASES) - 1 - NUMBER[case]
    assert engine.same_bits(engine.left(first, before), engine.left(again, now)) == []
    assert first.result.events[before] == again.result.events[now] != []
