"""What docs/architecture.md promises, for every fault that there is: a new injector is tested as soon as it exists.

All of them are trials of one pack, which is trained once for each promise; the tests look at one of them each.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from harness.config import NO_FAULT
from harness.loop.loop import train
from harness.objectives.outcome import NON_FINITE
from harness.training.sites import Agenda
from injectors.replay import Replay, record_of
from injectors.value import SITES
from tests.harness import engine
from tests.injectors.faults import SHAPE, START, STEPS, Named, cases, fault, train_told

CASES = cases()
NUMBER = {case: number for number, case in enumerate(CASES)}
every_fault = pytest.mark.parametrize("case", CASES)


def trial(a_fault=NO_FAULT, **fields):
    return engine.trial(**{**SHAPE, "batch": 4, "steps": STEPS, "fault": a_fault, "seed": 7, **fields})


def run(trials, block=STEPS, **options):
    """All rows stay to the last step, unless `block` is less than that."""
    return train_told(trials, block=block, **options)


@cache
def healthy(*seeds, **options):
    """Golden trials of these seeds, trained together: the same for every fault."""
    return run([trial(seed=seed) for seed in seeds], **options)


@cache
def everyone(**changes):
    """One trial for each case, its fault with these changes, and behind them their golden twin."""
    faulty = [trial(dataclasses.replace(fault(case), **changes)) for case in CASES]
    return run([*faulty, trial()])


def signals(found, planned, steps=slice(None)):
    """Those of one trial."""
    return {name: x[steps] for name, x in engine.left(found, planned).items() if name in found.signals}


def test_there_are_as_many_as_the_folder_has():
    assert len(CASES) > 35 and {"weight_bit", "rare_tokens", "stale_gradient", "value at update"} <= set(CASES)


# --- 1: control equals nothing --------------------------------------------------------------------------------------


@every_fault
def test_one_that_is_never_due_changes_no_bit(case):
    armed, own = everyone(start=STEPS), NUMBER[case]
    golden = healthy(7, 7)[0]
    assert [engine.same_bits(armed[number], golden) for number in (own, len(CASES))] == [[], []]
    assert armed.result.events[own] == [] and armed.result.strikes[own] == 0


@every_fault
def test_one_that_lasts_past_the_end_lasts_to_the_end(case):
    short, long, permanent = (everyone(duration=duration) for duration in (STEPS - START, 999, None))
    own, golden = NUMBER[case], healthy(7, 7)[0]
    for other in (long, permanent):
        assert engine.same_bits(short[own], other[own]) == []
        assert short.result.strikes[own] == other.result.strikes[own]
        assert engine.same_bits(other[len(CASES)], golden) == []


@every_fault
def test_its_period(case):
    found = everyone(duration=4, period=2)
    steps = {event.step for event in found.result.events[NUMBER[case]]}
    assert steps <= {START, START + 2} and START in steps


# --- 2 and 3: twins and isolation -----------------------------------------------------------------------------------

SEEDS = (1, 7, 2)


@cache
def between_neighbours(forks=False):
    """Each case between two golden trials, whose seeds take turns: trial 2 n + 1 is case n."""
    golden = [trial(seed=SEEDS[number % 3]) for number in range(len(CASES) + 1)]
    pairs = zip(golden, (trial(fault(case)) for case in CASES), strict=False)
    return run([*(each for pair in pairs for each in pair), golden[-1]], forks=forks)


@every_fault
@pytest.mark.parametrize("forks", [False, True])
def test_twins_are_equal_up_to_the_strike_and_neighbours_throughout(case, forks):
    found, own, plain = between_neighbours(forks), 2 * NUMBER[case] + 1, healthy(*SEEDS)
    twin, result = 2 * SEEDS.index(7), found.result
    assert {event.step for event in result.events[own]} <= set(range(START, STEPS)), "a record of every strike"
    assert result.events[own][0].step == START and result.events[own][0].changed
    assert engine.same_bits(signals(found, own, slice(START)), signals(found, twin, slice(START))) == []
    masked = result.masked_step[own]
    if masked is None:
        assert engine.same_bits(signals(found, own, slice(START, None)), signals(found, twin, slice(START, None)))
    else:
        after = slice(masked + 1, None)
        assert engine.same_bits(signals(found, own, after), signals(found, twin, after)) == []
    for neighbour in (own - 1, own + 1):
        assert engine.same_bits(found[neighbour], plain[neighbour // 2 % 3]) == []
    assert engine.same_bits(engine.left(found, own), engine.left(between_neighbours(), own)) == [], (
        "with other neighbours too"
    )


@cache
def killed():
    """The run of a pack that is never killed, and of one that is: before the strike, between two, and after them."""
    faulty = [trial(dataclasses.replace(fault(case), duration=3)) for case in CASES]
    trials = [*faulty, faulty[0].golden, trial(seed=1)]
    with TemporaryDirectory() as folder:
        kills = [START, START + 1, START + 3]
        resumed = engine.resumed(trials, Path(folder), kills, arm=Named.of)
    return run(trials, block=1), resumed


@every_fault
def test_a_killed_pack_goes_on_bit_for_bit(case):
    whole, resumed = killed()
    for number in (NUMBER[case], len(CASES), len(CASES) + 1):
        left, right = (
            {n: own[number] for n, own in vars(each.result).items() if n != "ends"} for each in (whole, resumed)
        )
        assert left == right
        assert engine.same_bits(whole[number], resumed[number]) == []
        states = [state(each.pack, number) for each in (whole, resumed)]
        assert engine.same_bits(*states) == []


def state(pack, planned):
    """Whatever a pack goes on from in the row of that trial, if it has one."""
    return {
        name: values[row] for row, each in enumerate(pack.rows) if each == planned for name, values in pack.rows_state
    }


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
    return run(trials, block=1)


@pytest.mark.parametrize("site", SITES)
def test_what_is_not_finite_stays_in_its_trial(site):
    found, plain, first = ruined(), healthy(0, 2), 5 * list(SITES).index(site)
    for neighbour in (first, first + 5):
        assert engine.same_bits(found[neighbour], plain[neighbour % 2]) == []
    assert found.result.strikes[first : first + 6] == [0, 1, 1, 1, 1, 0]
    if site not in ABSORBED:
        assert found.result.outcome[first + 1 : first + 4] == [NON_FINITE] * 3


RUINS = (math.nan, math.inf, -math.inf, 3e38)


@cache
def struck_in_ruins():
    """All cases in as many trials as there are RUINS: case n in 4 n to 4 n + 3, and the golden trial behind them."""

    def ruin(pack):
        for row in range(4 * len(CASES)):
            pack.weights[row] = RUINS[row % 4]

    faulty = [trial(dataclasses.replace(fault(case), start=2)) for case in CASES for _ in RUINS]
    return run([*faulty, trial()], prepare=ruin, detection=False, until=4)


@every_fault
def test_it_strikes_a_trial_that_is_not_finite(case):
    """Without detection nothing freezes, and an injector has to take what it finds."""
    found, first = struck_in_ruins(), 4 * NUMBER[case]
    assert min(found.result.strikes[first : first + 4]) > 0
    plain = healthy(7, 7, detection=False, until=4)
    assert engine.same_bits(found[4 * len(CASES)], plain[0]) == []


# --- 6: fork equals full run ----------------------------------------------------------------------------------------

STARTS = (2, 4, 5)
DOOMED = {"lr": 1e30, "warmup": 0, "clip": None}


@cache
def three_starts(forks):
    """Three strikes of each case at different steps share one prefix; rows come in the middle of a block.

    Behind them and the golden trial are some that freeze at once: the forked pack shrinks before the last strikes.
    """
    faulty = [trial(dataclasses.replace(fault(case), start=start)) for case in CASES for start in STARTS]
    doomed = [trial(seed=seed, **DOOMED) for seed in range(len(CASES) // 2)]
    return run([*faulty, trial(), *doomed], block=3, forks=forks)


@every_fault
def test_a_fork_equals_a_full_run(case):
    forked, full = (three_starts(forks) for forks in (True, False))
    assert len(forked.result.outcome) - 1 not in forked.weights[1], "rows have gone"
    own = range(3 * NUMBER[case], 3 * NUMBER[case] + 3)
    begins = [[each.pack.twins.begins[number] for number in own] for each in (forked, full)]
    assert begins[0] != begins[1], "some rows came later"
    for number in (*own, 3 * len(CASES)):
        assert engine.same_bits(signals(forked, number), signals(full, number)) == []
        same = forked.weights[-1].get(number), full.weights[-1].get(number)
        assert None in same or torch.equal(engine.bits(same[0]), engine.bits(same[1]))
        for name in ("outcome", "nonfinite_step", "events", "strikes", "changes"):
            assert getattr(forked.result, name)[number] == getattr(full.result, name)[number], name
        if case != "duplicated_batch":  # it looks at an earlier batch, so its row is its own from then on
            assert forked.result.masked_step[number] == full.result.masked_step[number]


# --- 7: replay ------------------------------------------------------------------------------------------------------


def replayed(faulty, found, planned):
    events = [event.to_dict() for event in found.result.events[planned]]
    record = record_of(faulty.to_dict(), events, found.corpus.fingerprint)
    return dataclasses.replace(faulty, fault=Replay(record=json.dumps(record)).resolved())


@cache
def replays():
    """What each case did between its neighbours again, the last case first."""
    first = between_neighbours()
    again = [replayed(trial(fault(case)), first, 2 * NUMBER[case] + 1) for case in reversed(CASES)]
    return run([*again, trial()])


@every_fault
def test_a_replay_is_the_same_run(case):
    first, again = between_neighbours(), replays()
    before, now = 2 * NUMBER[case] + 1, len(CASES) - 1 - NUMBER[case]
    assert engine.same_bits(engine.left(first, before), engine.left(again, now)) == []
    assert first.result.events[before] == again.result.events[now] != []


# --- 8: a fault that did nothing says so ----------------------------------------------------------------------------


@cache
def frozen(block):
    """Trials that freeze before their fault, one for each case, and behind them golden ones."""
    doomed = [trial(fault(case), **DOOMED) for case in CASES]
    return run([*doomed, *(trial(seed=seed) for seed in (1, 2, 3, 4))], block=block)


@every_fault
@pytest.mark.parametrize("block", [1, STEPS], ids=["a pack that shrinks", "a pack that keeps its rows"])
def test_one_whose_trial_froze_before_never_fires(case, block):
    found, own = frozen(block), NUMBER[case]
    assert (own in found.weights[-1]) == (block == STEPS)
    assert found.result.nonfinite_step[own] < START
    assert found.result.events[own] == [] and found.result.strikes[own] == found.result.changes[own] == 0


# --- 9: after a rollback --------------------------------------------------------------------------------------------


@cache
def rolled_back(duration):
    """Losses of the steps before the strikes, of those from there on, and of the same again after a rollback.

    With them come the agenda at the end, and each trial's events before the rollback; the golden trial is the last.
    """
    faulty = [trial(dataclasses.replace(fault(case), duration=duration)) for case in CASES]
    trials = [*faulty, faulty[0].golden]
    agenda, pack, losses = Agenda([Named.of(each) for each in trials]), engine.pack_of(trials), []

    def go(steps):
        train(pack, agenda, 100, lambda first, arrays: losses.append(arrays["loss"]), until=steps.stop)

    go(range(START))
    before = copy.deepcopy(pack.whole_state())
    go(range(START, STEPS))
    first = [list(events) for events in agenda.events]
    pack.restore(before)
    for number in range(len(trials)):
        agenda.roll_back(number, STEPS)
    go(range(START, STEPS))
    return losses, agenda, first


@every_fault
@pytest.mark.parametrize("permanent", [False, True])
def test_after_a_rollback_a_fault_that_is_permanent_or_in_the_data_strikes_again(case, permanent):
    losses, agenda, before = rolled_back(None if permanent else 2)
    own, first = NUMBER[case], before[NUMBER[case]]
    struck, again, golden = losses[1][own], losses[2][own], losses[2][-1]
    if permanent or agenda.is_of_data(own):
        assert agenda.strikes[own] == 2 * len(first) or len(first) == 64
        assert np.array_equal(struck, again, equal_nan=True)
    else:
        assert agenda.events[own] == first, "nothing struck"
        assert np.array_equal(again, golden)
    assert np.array_equal(losses[1][-1], golden), "the golden twin does the same again"
