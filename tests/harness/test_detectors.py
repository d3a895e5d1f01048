"""What every detector has to keep, whatever its rule: found by themselves, and fed with the same signals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from harness.detectors import combined
from harness.detectors.base import AFTER_THE_STEP
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS
from harness.detectors.windows import Window
from harness.model.state import State
from harness.testing.detectors import (
    JUMP,
    ROWS,
    STEPS,
    STRUCK,
    DetectorPromises,
    falling,
    heavy_tails,
    jumping,
    plateau,
)
from tests.benchmarks import detection


def promises(name: str) -> DetectorPromises:
    return DetectorPromises(DETECTORS[name])


def options_of(name: str, **given: Any) -> Any:
    return promises(name).options(**given)


def fed(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return promises(name).fed(values)


def signals(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    return promises(name).signals(values)


@pytest.mark.parametrize("promise", DetectorPromises.names())
@pytest.mark.parametrize("name", DETECTORS)
def test_each_promise(name: str, promise: str) -> None:
    promises(name).check(promise)


@pytest.mark.parametrize("name", [name for name in DETECTORS if name != "finite"])
def test_the_signals_of_the_promises_are_judged(name: str) -> None:
    values = jumping(plateau(), 150)[:, :250]
    values[::2] *= 0.11
    assert not np.isnan(promises(name).fed(values, **DETECTORS[name].reach)[1]).all()


@pytest.mark.parametrize("name", [name for name, cls in DETECTORS.items() if AFTER_THE_STEP & set(cls.watches)])
def test_a_step_that_was_not_taken_makes_none_deaf(name: str) -> None:
    """Nothing has changed at it: the change is 0, or not known of layers, and the rest is what it was."""
    taken = signals(name, jumping(plateau(), STRUCK, 1.2 * 3))
    skipped = {signal: x.copy() for signal, x in taken.items()}
    for signal in AFTER_THE_STEP.intersection(skipped):
        changed = {"update_rms": 0.0, "qk_rank": np.nan}.get(signal, skipped[signal][:, STRUCK - 101])
        skipped[signal][:, STRUCK - 100] = changed
    seen = [
        replay(DETECTORS[name], options_of(name), of, np.ones((ROWS, STEPS), bool))[0][:, STRUCK : STRUCK + JUMP]
        for of in (taken, skipped)
    ]
    assert np.array_equal(seen[0].any(1), seen[1].any(1))
    assert seen[0].any(1).all() or name not in ("combined", "update_norm"), "a rise by a fifth"


@pytest.mark.parametrize("name", [name for name, cls in DETECTORS.items() if "grad_norm" in cls.watches])
def test_a_gradient_that_is_not_finite_behind_a_loss_that_is(name: str) -> None:
    values = dict(signals(name, plateau()))
    values["grad_norm"] = values["grad_norm"].copy()
    values["grad_norm"][:, STRUCK] = np.nan
    alarms, _ = replay(DETECTORS[name], options_of(name), values, np.ones((ROWS, STEPS), bool))
    assert alarms[:, STRUCK].all() and alarms[:, STRUCK + 1 :].mean() < 0.01


def test_a_step_that_was_not_taken_is_no_news_to_the_norms_after_it() -> None:
    """The norm of the weights moves along a line, and stands still where an update was skipped."""
    values = {signal: signals("combined", plateau())[signal].copy() for signal in DETECTORS["combined"].watches}
    values["param_norm"][:] = 50 * (1 + 1e-3 * np.arange(STEPS))
    values["update_per_rate"][:, STRUCK] = 0
    for name in ("param_norm", "second_moment_norm"):
        values[name][:, STRUCK:] = values[name][:, STRUCK - 1 : -1]
    alarms, _ = replay(DETECTORS["combined"], options_of("combined"), values, np.ones((ROWS, STEPS), bool))
    assert not alarms[:, STRUCK - 5 : STRUCK + 20].any()


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [3.0, 1e25, -3e38])
def test_a_window_has_the_statistics_of_its_last_values_whatever_the_first_was(first: float) -> None:
    length, values = 16, plateau()[:, :60].reshape(ROWS // 2, 2, 60)
    values[:, :, 0] = first
    window = Window(State(ROWS // 2), "window", torch.from_numpy(values[..., 0]), length)
    for step in range(values.shape[-1]):
        window.add(torch.from_numpy(values[..., step]), torch.ones(ROWS // 2, dtype=torch.bool))
        last = values[..., max(0, step + 1 - length) : step + 1]
        median = np.median(last, -1)
        expected = [last.mean(-1), median, np.median(np.abs(last - median[..., None]), -1)]
        (mean, std), (middle, mad) = window.mean_std(), window.median_mad()
        for found, value in zip([window.mean(), middle, mad], expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-12)
        assert torch.equal(mean, window.mean())
        if step:
            np.testing.assert_allclose(std, last.std(-1, ddof=1), rtol=1e-10)


def test_equal_values_have_no_deviation_at_all() -> None:
    window = Window(State(ROWS), "window", torch.zeros(ROWS), 7)
    everyone = torch.ones(ROWS, dtype=torch.bool)
    assert all(x.isnan().all() for x in (window.mean(), *window.mean_std(), *window.median_mad()))
    for value in [1e25, *[3.1] * 17]:
        window.add(torch.full((ROWS,), value, dtype=torch.float64), everyone)
    for centre, spread in (window.mean_std(), window.median_mad()):
        assert (centre == 3.1).all() and (spread == 0).all()


def test_a_huge_first_gradient_is_forgotten_with_its_window() -> None:
    values = plateau()
    usual, huge = (dict(signals("skip_step", values)) for _ in range(2))
    huge["grad_norm"][:, 0] = 1e20
    ends = [
        replay(DETECTORS["skip_step"], options_of("skip_step"), of, np.ones(values.shape, bool)) for of in (usual, huge)
    ]
    assert not ends[1][0].any()
    np.testing.assert_allclose(ends[1][1][:, 129:], ends[0][1][:, 129:], rtol=1e-9)


def test_a_loss_that_changes_its_sign_has_no_scale() -> None:
    """As that of a critic, or a reward: no alarm near 0, while a gradient that jumps is still one."""
    values = {signal: x.copy() for signal, x in signals("combined", plateau()).items()}
    values["param_norm"][:] = 50 * (1 + 1e-3 * np.arange(STEPS))
    values["loss"] = 0.1 * np.random.default_rng(4).standard_normal((ROWS, STEPS))
    values["loss"][:, 0] = -0.1  # one that has not been below 0 yet may be any other
    taken = np.ones((ROWS, STEPS), bool)
    assert not replay(DETECTORS["combined"], options_of("combined"), values, taken)[0].any()
    values["grad_norm"][:, STRUCK] *= 100
    alarms, _ = replay(DETECTORS["combined"], options_of("combined"), values, taken)
    assert alarms[:, STRUCK].all() and alarms.sum() == ROWS


@pytest.mark.parametrize("curve", [plateau, falling, heavy_tails])
def test_combined_says_the_same_with_numpy_as_with_torch(curve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what it counts with on a GPU: through jumps, NaN, zeros and losses that change their sign."""
    values = jumping(curve(), STRUCK).astype("f4")
    values[1, 100:103], values[2, 200], values[3, 300:] = np.nan, 0.0, values[3, 300:] - 3
    values[4, 50:] *= np.float32(1e30)
    here = fed("combined", values)
    monkeypatch.setattr(combined, "library", lambda device: torch)
    there = fed("combined", values)
    assert here[0].any(axis=1).sum() > 3
    assert np.array_equal(here[0], there[0])
    np.testing.assert_allclose(here[1], there[1], rtol=1e-10, atol=1e-12)  # roots differ in the last bit


@pytest.mark.parametrize("name", DETECTORS)
def test_what_judging_costs_can_be_measured(name: str) -> None:
    """The benchmark knows each signal that a detector watches, those that no store has as well."""
    assert detection.judged(name, 2, 3, steps=2) > 0
