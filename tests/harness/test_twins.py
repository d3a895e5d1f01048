"""Twins that share a row: bookkeeping, forks, and faults that are over and have left nothing, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
import torch

from harness.config import NO_FAULT
from harness.objectives.outcome import NON_FINITE
from harness.testing import engine
from harness.training.pack_sizes import smallest_pack
from harness.training.sites import Site
from harness.training.twins import Twins
from injectors.batch import RandomTokens
from injectors.ranks import StaleGradient
from injectors.value import Value

STEPS = 8
IDLE = {"model": "round"}  # to fp32: it writes what was there
ABSORBED = {"site": Site.UPDATE, "tensor": "blocks.1.feedforward.up", "element": 37, "bit": 3}
"""Eight units in the last place of an update of some 1e-3 are lost when it is added to a weight of some 0.3."""


def faulty(start=4, **fields):
    """A trial with a value fault; fields of the trial stand in `of`."""
    of = fields.pop("of", {})
    return engine.trial(fault=Value(start=start, **{"tensor": "blocks.*", "bit": 20, **fields}), **of)


def signals(run, planned, steps=slice(None)):
    return {name: values[steps] for name, values in run[planned].items() if name != "weights"}


def same(left, right, number=None, other=None):
    """Whether two runs, or two trials of one, left the same signals."""
    return engine.same_bits(signals(left, number), signals(right, number if other is None else other)) == []


# --- bookkeeping -------------------------------------------------------------------------------------------------


def family(count, **fields):
    """A golden trial and its faulty ones, which begin at steps 1, 2, ..."""
    return [engine.trial(**fields), *(faulty(start=1 + i, of=fields) for i in range(count))]


def test_who_leads_whom():
    """The first of equal golden trials; a faulty one without its twin is on its own, and so is every golden one."""
    ours, others = family(2), family(2, seed=1)
    trials = [*ours, others[1], engine.trial(), engine.trial(seed=2), engine.trial(), faulty(of={"lr": 1.0})]
    twins = Twins(trials, [None, 1, 2, 1, None, None, None, 4], smallest=0)
    assert twins.leader == [None, 0, 0, None, None, None, None, None]
    assert twins.begins == [0, 1, 2, 0, 0, 0, 0, 0]


def test_one_that_never_strikes_never_begins():
    twins = Twins(family(2), [None, None, 2], smallest=0)
    assert twins.begins == [0, math.inf, 2]
    assert [twins.beginning(step) for step in range(4)] == [[0], [], [2], []]
    assert all(twins.shares(1, step) == 0 for step in (0, 7, 10**6))


@pytest.mark.parametrize(
    ("smallest", "begins"),
    [(0, [0, 9, 3, 5]), (1, [0, 9, 3, 5]), (2, [0, 9, 0, 5]), (3, [0, 9, 0, 0]), (4, [0, 0, 0, 0]), (9, [0, 0, 0, 0])],
)
def test_the_smallest_pack_is_filled_with_those_that_begin_first(smallest, begins):
    assert Twins(family(3), [None, 9, 3, 5], smallest).begins == begins


@pytest.mark.parametrize("length", [1, 2, 3, 4, 10])
def test_values_of_shared_steps_are_those_of_the_twin(length):
    """Whatever the blocks, and however many dimensions a signal has."""
    begins = [None, 3, 3, 0, 9, None, 5, 4]
    masked = {2: 3, 3: 5, 6: 9, 7: 4}
    twins = Twins([engine.trial(), *[faulty()] * 7], begins, smallest=0)
    twins.masked = masked
    steps = range(10)
    own = {"loss": np.random.default_rng(0).random((8, 10)), "rms": np.random.default_rng(1).random((8, 10, 3))}
    expected = {name: values.copy() for name, values in own.items()}
    for number, begin in enumerate(begins):
        for step in steps:
            has_row = number == 0 or (begin is not None and begin <= step <= masked.get(number, math.inf))
            assert twins.shares(number, step) == (None if has_row else 0)
            for name, values in own.items() if not has_row else ():
                expected[name][number, step] = values[0, step]
    for first in range(0, 10, length):
        block = {name: values[:, first : first + length].copy() for name, values in own.items()}
        twins.fill(first, block)
        for name, values in block.items():
            assert np.array_equal(values, expected[name][:, first : first + length])


# --- forks -------------------------------------------------------------------------------------------------------


def test_what_a_family_costs():
    """t + N (T - t) steps of a row, or one row more before the strike in a pack that would be too small."""
    rows = []

    def count(pack):
        learn = pack.learn

        def counting(*batch):
            rows.append(len(pack))
            return learn(*batch)

        pack.learn = counting

    engine.run([engine.trial(), *(faulty(start=6, element=i) for i in range(10))], prepare=count, forks=True)
    assert rows == [2] * 6 + [11] * 2
    rows.clear()
    goldens = [engine.trial(), engine.trial(seed=1)]
    engine.run([*goldens, *(faulty(start=3 + i) for i in range(4))], prepare=count, forks=True)
    assert rows == [2, 2, 2, 3, 4, 5, 6, 6]


@cache
def forty_children(threads):
    """Of two golden trials; and their run without forks, on as many threads."""
    trials = [engine.trial(), engine.trial(seed=1)]
    sites = (Site.WEIGHT, Site.ACTIVATION, Site.REDUCED_GRADIENT, Site.UPDATE)
    for i in range(40):
        fault = Value(start=(2, 4, 7)[i % 3], site=sites[i % 4], tensor="blocks.*", bit=18 + i % 6, seed=i)
        trials.append(engine.trial(fault=fault, seed=i % 2))
    return trials, engine.run(trials)


@pytest.mark.parametrize(("threads", "block"), [(1, 1), (1, 3), (1, 100), (2, 3)])
def test_forty_children_at_three_strikes(threads, block):
    """They pass through the model in parts, and where those end changes with every fork."""
    torch.set_num_threads(threads)
    forked = engine.assert_fork_equals_full_run(*forty_children(threads), block=block)
    assert all(events for events in forked.result.events[2:]) and len(forked.pack.parts) > 3
    assert sorted(set(forked.pack.twins.begins)) == [0, 2, 4, 7]


def test_a_fork_in_a_pack_of_other_rates_and_decays():
    """Each child goes on with its own trial's hyperparameters and its own batches."""
    goldens = engine.different(6, batch=4, ranks=2)
    faults = [
        Value(start=3, tensor="head", bit=22),
        RandomTokens(start=5, duration=2),
        StaleGradient(start=4, late=3, rank=1),
    ]
    trials = [*(dataclasses.replace(golden, fault=faults[i % 3]) for i, golden in enumerate(goldens)), *goldens]
    forked = engine.assert_fork_equals_full_run(trials, block=3)
    assert forked.pack.twins.begins[:6] == [3, 5, 1, 3, 5, 1], "from the first step that it looks at"


# --- what is not finite ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("size", [2, 5])
def test_a_golden_trial_that_is_not_finite_takes_those_along_that_have_not_begun(size, block):
    doomed = {"lr": 1e30, "warmup": 0}
    trials = [engine.trial(**doomed), *(faulty(start=4 + i % 3, of=doomed) for i in range(3))]
    trials += [engine.trial(seed=1 + r) for r in range(size - 1)]
    forked = engine.assert_fork_equals_full_run(trials, block=block)
    froze = forked.result.nonfinite_step[0]
    assert froze is not None and froze < 4
    for number in (1, 2, 3):
        assert forked.result.nonfinite_step[number] == froze and forked.result.outcome[number] == NON_FINITE
        assert same(forked, forked, 0, number) and np.isnan(forked.signals["loss"][number, froze + 1 :]).all()
        assert forked.result.events[number] == [] and forked.result.strikes[number] == 0
        assert forked.result.masked_step[number] is None


def test_a_golden_trial_alone_that_is_not_finite_ends_the_pack():
    doomed = {"lr": 1e30, "warmup": 0}
    run = engine.run([engine.trial(**doomed), *(faulty(start=7, of=doomed) for _ in range(4))], forks=True)
    assert run.signals["loss"].shape[1] == run.result.nonfinite_step[0] + 1 < 7
    assert run.result.nonfinite_step == [run.result.nonfinite_step[0]] * 5 and run.result.outcome == [NON_FINITE] * 5


def test_what_ends_after_the_fork_ends_alone():
    """The faulty trial is ruined; its twin and its sisters go on."""
    ruined = faulty(start=3, model="nan")
    trials = [engine.trial(), ruined, faulty(start=5), faulty(start=6)]
    forked = engine.assert_fork_equals_full_run(trials)
    assert forked.result.nonfinite_step == [None, 3, None, None]


# --- masked faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("forks", [False, True])
def test_a_masked_trial_is_its_twin_from_then_on(forks, block):
    """An update whose last bits are lost: something changed, and the weight did not."""
    trials = [engine.trial(), engine.trial(seed=1), faulty(**ABSORBED), faulty(duration=3, **ABSORBED)]
    trials.append(faulty())
    run = engine.run(trials, forks=forks, block=block)
    assert run.result.masked_step == [None, None, 4, 6, None]
    assert run.result.changes == [0, 0, 1, 3, 1]
    assert same(run, run, 0, 2) and same(run, run, 0, 3) and not same(run, run, 0, 4)
    assert [run.result.outcome[i] for i in (2, 3)] == [run.result.outcome[0]] * 2
    if block < 100:
        assert run.pack.rows == [0, 1, 4], "their rows are gone"


@pytest.mark.parametrize("block", [1, 3])
def test_rows_that_leave_change_nothing_for_those_that_stay(block):
    """Idle faults leave at once; the others go on as in a pack without them."""
    lasting = [faulty(start=2 + i, element=i) for i in range(3)]
    idle = [faulty(start=1 + i % 5, **IDLE) for i in range(6)]
    run = engine.run([engine.trial(), *idle, *lasting], forks=True, block=block)
    alone = engine.run([engine.trial(), *lasting], forks=True, block=block)
    assert run.result.masked_step == [None, *(1 + i % 5 for i in range(6)), None, None, None]
    assert run.pack.rows == [0, 7, 8, 9]
    for number, other in ((0, 0), (7, 1), (8, 2), (9, 3)):
        assert engine.same_bits(run[number], alone[other]) == []
        assert run.result.events[number] == alone.result.events[other]


def test_no_claim_while_a_fault_goes_on():
    """Whose state is its twin's all the time: only after its last strike is it known that nothing came of it."""
    endings = {1: 4, 2: 5, 4: 7, 99: 7, None: 7}
    trials = [engine.trial(), *(faulty(duration=duration, **IDLE) for duration in endings)]
    trials.append(faulty(duration=4, period=3, model="stuck_at_0", bit=30))  # no weight is 2 or more
    for forks in (False, True):
        run = engine.run(trials, forks=forks)
        assert run.result.masked_step == [None, *endings.values(), 7]
        assert run.result.changes == [0] * 7 and run.result.strikes == [0, 1, 2, 4, 4, 4, 2]


def test_a_state_that_only_looks_equal_is_not_masked():
    """The loss of the step is that of the twin, and without a learning rate the weights stay so too."""
    rate = faulty(site=Site.LEARNING_RATE, tensor="*", model="scale", value=2.0, bit=None)
    run = engine.run([engine.trial(), rate])
    assert run.signals["loss"][0, 4] == run.signals["loss"][1, 4] and run.result.masked_step == [None, None]
    still = {"of": {"lr": 0.0}, "tensor": "head", "element": 0, "model": "scale", "value": 1.5}
    moments = [faulty(site=site, **still) for site in (Site.MOMENT_1, Site.MOMENT_2)]
    run = engine.run([engine.trial(lr=0.0), *moments])
    assert np.array_equal(run.signals["loss"][0], run.signals["loss"][1]) and run.result.changes == [0, 1, 1]
    assert run.result.masked_step == [None] * 3


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_smallest_pack_stays(threads):
    """A smaller one would round otherwise; masked rows stay to fill it, and are twins all the same."""
    torch.set_num_threads(threads)
    trials = [engine.trial(), *(faulty(start=1, element=i, **IDLE) for i in range(7))]
    for forks in (False, True):
        run = engine.run(trials, forks=forks)
        assert len(run.pack) == smallest_pack(engine.CPU) == max(2, threads) and run.pack.rows[0] == 0
        assert run.result.masked_step == [None] + [1] * 7
        assert all(same(run, run, 0, i) for i in range(8))
    assert same(run, engine.run([engine.trial(), engine.trial(seed=1)] * 2), 0)


@pytest.mark.parametrize("block", [1, 2, 100])
def test_a_masked_trial_ends_as_its_twin_does(block):
    """When that is not finite later on, in a row of its own or not."""
    doomed = {"lr": 1e30, "warmup": 0}
    for others in (0, 6):
        trials = [engine.trial(**doomed), faulty(start=0, of=doomed, **IDLE)]
        trials += [engine.trial(seed=1 + r) for r in range(others)]
        run = engine.run(trials, block=block)
        froze = run.result.nonfinite_step[0]
        assert run.result.masked_step[1] == 0 and froze > 0
        assert run.result.nonfinite_step[1] == froze and run.result.outcome[:2] == [NON_FINITE] * 2
        assert same(run, run, 0, 1)


def test_a_twin_that_is_not_in_the_pack_masks_nobody():
    run = engine.run([faulty(**IDLE), engine.trial(seed=1)], forks=True)
    assert run.result.masked_step == [None, None] and run.pack.twins.leader == [None, None]
    assert run.pack.planned[0].golden.fault == NO_FAULT
