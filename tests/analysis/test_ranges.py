"""What is usual around a step, and what leaves it."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.measures.outcomes import WINDOW, golden_range, leaves_range

STEPS = 60
ONE = np.array([0])


def test_the_range_is_that_of_the_steps_around_widened_by_itself() -> None:
    golden = np.zeros((1, STEPS))
    golden[0, 30] = 2.0
    low, high = golden_range(golden)
    near = np.abs(np.arange(STEPS) - 30) <= WINDOW
    np.testing.assert_array_equal(high[0], np.where(near, 4, 0))
    np.testing.assert_array_equal(low[0], np.where(near, -2, 0))


def test_what_was_usual_at_the_start_of_training_is_not_later() -> None:
    golden = np.concatenate([np.linspace(10, 2, 15), np.tile([2.0, 2.5], STEPS)])[None, :STEPS]
    raised = golden + 3
    assert not leaves_range(raised, golden, ONE)[0, :5].any()
    assert leaves_range(raised, golden, ONE)[0, 30:].all()


def test_what_was_not_measured_tells_nothing() -> None:
    nothing, something = np.full((1, STEPS), np.nan), np.ones((1, STEPS))
    assert not leaves_range(nothing, something, ONE).any() and not leaves_range(something, nothing, ONE).any()


def test_every_curve_has_its_own_twin() -> None:
    golden = np.array([np.zeros(STEPS), np.ones(STEPS)])
    values = np.array([np.ones(STEPS), np.ones(STEPS), np.zeros(STEPS)])
    assert leaves_range(values, golden, np.array([0, 1, 0])).all(axis=1).tolist() == [True, False, False]


def test_normal_noise_of_another_run_rarely_leaves_it() -> None:
    """The widened range is where the docstring has it: about 5.7 standard deviations, so one value in millions.

    The range of 21 values varies, so more than that leave it; one in a thousand would already tell another rule apart.
    """
    rng = np.random.default_rng(0)
    golden, other = rng.normal(size=(2, 50, 1000))
    low, high = golden_range(golden)
    assert np.mean(high - low) / 2 == pytest.approx(5.67, abs=0.05)
    assert leaves_range(other, golden, np.arange(50)).mean() < 1e-3
