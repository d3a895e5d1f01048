"""Schedules that go wrong: the rate in force is the one that the fault promises, and the signal says so."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from harness.optim.schedules import rates_of
from harness.testing import engine
from harness.training.sites import Site
from injectors.schedule import ScheduleOffset, WarmupSkipped
from tests.injectors.faults import composer
from tests.injectors.spies import START, STEPS, trial

WARMUP, LR = 6, 3e-3


@cache
def run_with(faults, **fields):
    """A golden trial, and one for each fault: that of fault n is number n + 1."""
    return engine.run([trial(lr=LR, **fields), *(trial(fault, lr=LR, **fields) for fault in faults)])


def rates(run, number=1):
    """The golden trial's and a struck one's rate at every step, float32, and the steps of the events."""
    golden, struck = run.signals["learning_rate"][[0, number]].astype(np.float32)
    scheduled = rates_of(run.pack.planned[0])[:STEPS].astype(np.float32)
    assert np.array_equal(golden, scheduled)
    for event in run.result.events[number]:
        assert (event.site, event.tensor, event.index) == (Site.LEARNING_RATE, "learning_rate", ())
        assert np.float32(event.before) == scheduled[event.step] and np.float32(event.after) == struck[event.step]
        assert event.changed == (event.before != event.after)
    steps = [event.step for event in run.result.events[number]]
    assert np.isin(np.flatnonzero(golden != struck), steps).all()
    return scheduled, struck, steps


def test_the_preset_of_a_jump():
    fault = composer().trial(["fault=learning_rate_jump", "fault.start=2", "fault.duration=3"]).fault
    scheduled, struck, steps = rates(run_with((fault,)))
    expected = scheduled * np.where(np.isin(np.arange(STEPS), [2, 3, 4]), np.float32(10), np.float32(1))
    assert np.array_equal(struck, expected) and steps == [2, 3, 4]
    assert composer().trial(["fault=learning_rate_jump"]).fault.duration == 10


def test_a_jump_moves_the_weights_by_that_factor():
    """Adam's update is the rate times a direction, and so is the decay; adding to a weight rounds at 6e-8 of it."""
    fault = composer().trial(["fault=learning_rate_jump", f"fault.start={START}", "fault.duration=1"]).fault
    run = engine.run([trial(), trial(fault)])
    golden, struck = run.signals["update_rms"][:, START]
    assert struck == pytest.approx(10 * golden, rel=1e-4) and golden > 1e-3  # each weight's update is some 1e-3


OFFSETS, TIMES = (-100, -3, -1, 0, 1, 2, 3, 100), ((None, 1), (2, 1), (4, 2))
AHEAD = tuple(
    ScheduleOffset(start=START, duration=duration, period=period, offset=offset)
    for offset, (duration, period) in product(OFFSETS, TIMES)
)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("duration", "period"), TIMES)
def test_a_schedule_that_is_ahead_or_behind(offset, duration, period):
    """Beyond its ends the rate is that of its first or last step."""
    number = 1 + len(TIMES) * OFFSETS.index(offset) + TIMES.index((duration, period))
    scheduled, struck, steps = rates(run_with(AHEAD), number)
    assert steps == list(range(START, STEPS if duration is None else START + duration, period))
    for step in range(STEPS):
        read = min(max(step + offset, 0), STEPS - 1) if step in steps else step
        assert struck[step] == scheduled[read], step


LEFT_OUT = {(0, None): range(6), (3, None): range(3, 6), (1, 2): [1, 2], (4, 9): [4, 5]}
SKIPPED = tuple(WarmupSkipped(start=start, duration=duration) for start, duration in LEFT_OUT)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize(("start", "duration", "steps"), [(*times, steps) for times, steps in LEFT_OUT.items()])
def test_a_warmup_that_is_left_out(start, duration, steps, precision):
    """Its remaining steps are taken at the peak, and what comes after it is as planned."""
    run = run_with(SKIPPED, warmup=WARMUP, precision=precision)
    scheduled, struck, struck_steps = rates(run, 1 + list(LEFT_OUT).index((start, duration)))
    expected = [np.float32(LR) if step in steps else scheduled[step] for step in range(STEPS)]
    assert struck.tolist() == expected and struck_steps == list(steps)


def test_the_default_warmup_can_be_skipped():
    """5% of the steps."""
    fault = WarmupSkipped(start=1)
    run = engine.run(
        [
            trial(fault, warmup=None, steps=60, validate_every=60),
            trial(warmup=None, steps=60, validate_every=60),
        ]
    )
    struck, golden = run.signals["learning_rate"]
    assert [event.step for event in run.result.events[0]] == [1, 2]
    assert golden[:3] == pytest.approx([1e-3, 2e-3, 3e-3], rel=1e-6) and struck[:3] == pytest.approx(
        [1e-3, 3e-3, 3e-3], rel=1e-6
    )
    assert np.array_equal(struck[3:], golden[3:])


def test_the_skipped_step_at_the_peak_changes_nothing_and_says_so():
    run = engine.run([trial(WarmupSkipped(start=WARMUP - 1)), trial()])
    assert (run.result.strikes[0], run.result.changes[0]) == (1, 0)
    assert engine.same_bits(run[0], run[1]) == []
