"""What every detector has to keep, whatever its rule: found by themselves, and fed with the same signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from harness.detectors import combined
from harness.detectors.base import AFTER_THE_STEP, Detector
from harness.detectors.replay import replay
from harness.detectors.table import DETECTORS
from harness.detectors.windows import Window
from harness.model.state import State
from tests.benchmarks import detection
from tests.benchmarks.detection import along_of

ROWS, STEPS, LAYERS, RANKS, STRUCK = 8, 700, 2, 3, 400
JUMP = 6  # steps that it lasts: some rules ask for several
LEVELS = [name for name in DETECTORS if name != "checksum"]  # which watches for what is above 0, with no usual level
SEEING = [name for name, cls in DETECTORS.items() if not cls.blind]


def noise(spread: float = 0.02) -> np.ndarray:
    return spread * np.random.default_rng(1).standard_normal((ROWS, STEPS))


def plateau() -> np.ndarray:
    return 3 + noise()


def falling() -> np.ndarray:
    return 2 + 4 * np.exp(-np.arange(STEPS) / 150) + noise()


def heavy_tails() -> np.ndarray:
    return 3 + 0.02 * np.random.default_rng(2).standard_t(3, (ROWS, STEPS))


def options_of(name: str, **given: Any) -> Any:
    cls = DETECTORS[name]
    module = __import__(cls.__module__, fromlist=["Options"])
    return module.Options(**given) if hasattr(module, "Options") else None


def fed(name: str, values: np.ndarray, **given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Alarms and scores where every signal that the detector watches has these values, seen at the same step."""
    return replay(DETECTORS[name], options_of(name, **given), signals(name, values), np.ones(values.shape, bool))


def signals(name: str, values: np.ndarray) -> Mapping[str, np.ndarray]:
    shifted = np.concatenate([values[:, 1:], values[:, -1:]], 1)
    of = {signal: shifted if signal in AFTER_THE_STEP else values for signal in DETECTORS[name].watches}
    sizes = {"layer": LAYERS, "rank": RANKS}
    shapes = {signal: [sizes[dim] for dim in along_of(signal)] for signal in of}
    return {
        signal: np.broadcast_to(x.reshape(*x.shape, *[1] * len(shapes[signal])), (*x.shape, *shapes[signal])).copy()
        for signal, x in of.items()
    }


def jumping(values: np.ndarray, step: int, to: float = 8) -> np.ndarray:
    struck = values.copy()
    struck[:, step : step + JUMP] = to
    return struck


@pytest.mark.parametrize("name", LEVELS)
def test_what_does_not_change_is_no_alarm(name: str) -> None:
    assert not fed(name, np.full((ROWS, STEPS), 3.1))[0].any()


@pytest.mark.parametrize("name", LEVELS)
def test_a_loss_that_falls_is_no_alarm_unless_the_rule_is_such(name: str) -> None:
    alarms, _ = fed(name, falling())
    assert alarms.any() == bool(DETECTORS[name].falling)


LATER = [1, 10, 100]
BROKEN = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("name", SEEING)
def test_a_jump_is_seen_after_what_is_not_finite(name: str) -> None:
    """Some rows for each time after it, and in them each value that is not finite; rows know nothing of each other."""
    values = np.concatenate([jumping(plateau(), STRUCK + later) for later in LATER])
    values[:, STRUCK] = np.resize(BROKEN, len(values))
    alarms, scores = fed(name, values, **DETECTORS[name].reach)
    assert alarms[:, STRUCK].all() and np.isnan(scores[:, STRUCK]).all()
    for said, later in zip(np.split(alarms, len(LATER)), LATER, strict=True):
        assert said[:, STRUCK + later : STRUCK + later + JUMP].any(1).all(), later
        assert said[:, STRUCK + 1 : STRUCK + later].sum() <= 0.02 * ROWS * later, "it is nervous afterwards"


@pytest.mark.parametrize("name", SEEING)
def test_a_jump_is_seen(name: str) -> None:
    """On a plateau, in a loss that falls, and among heavy tails."""
    curves = np.concatenate([jumping(curve(), STRUCK, 20) for curve in (plateau, falling, heavy_tails)])
    alarms, _ = fed(name, curves, **DETECTORS[name].reach)
    assert alarms[:, STRUCK : STRUCK + JUMP].any(1).all()


@pytest.mark.parametrize("name", SEEING)
def test_a_jump_is_seen_after_a_slow_drift(name: str) -> None:
    values = plateau() + np.clip(np.arange(STEPS) - 100, 0, 200) / 200
    alarms, _ = fed(name, jumping(values, STRUCK, 12), **DETECTORS[name].reach)
    assert alarms[:, STRUCK : STRUCK + JUMP].any(1).all()


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


@pytest.mark.parametrize("name", DETECTORS)
def test_rows_know_nothing_of_each_other(name: str) -> None:
    values = jumping(heavy_tails(), STRUCK)
    alarms, scores = fed(name, values)
    mixed = values.copy()
    mixed[::2, 50:] = np.nan
    others = fed(name, mixed)
    assert np.array_equal(alarms[1::2], others[0][1::2])
    assert np.array_equal(scores[1::2], others[1][1::2], equal_nan=True)
    for alone in (slice(0, 1), slice(3, 5)):
        again = fed(name, values[alone])
        assert np.array_equal(alarms[alone], again[0]) and np.array_equal(scores[alone], again[1], equal_nan=True)


@pytest.mark.parametrize("name", DETECTORS)
def test_a_row_that_waits_remembers_and_says_nothing(name: str) -> None:
    """Rows stand at different steps: one that takes every other step of the loop sees what it would have seen."""
    values = jumping(plateau(), 150)[:, :250]
    values[::2] *= 0.11  # shares of 0.33, and then of 0.88
    cls, given = DETECTORS[name], signals(name, values)
    detector = made(cls, name, **cls.reach)
    expected = fed(name, values, **cls.reach)
    lags, slow = bool(AFTER_THE_STEP.intersection(cls.watches)), []
    for tick in range(2 * values.shape[1]):
        step = tick // 2
        shown = {k: torch.from_numpy(x[:, max(0, step - (k in AFTER_THE_STEP))]) for k, x in given.items()}
        is_new = tick % 2 == 1 and not (lags and step == 0)
        is_alarm, score = detector.judge(shown, torch.full((ROWS,), is_new))
        if tick % 2:
            slow.append((is_alarm.numpy(), score.numpy()))
        else:
            assert not is_alarm.any() and score.isnan().all()
    for found, whole in zip(zip(*slow, strict=True), expected, strict=True):
        assert np.array_equal(np.stack(found, 1), whole, equal_nan=True)
    assert name == "finite" or not np.isnan(expected[1]).all(), "it says nothing of these values"


@pytest.mark.parametrize("name", DETECTORS)
def test_a_row_that_begins_anew_is_as_one_that_begins(name: str) -> None:
    detector, fresh = made(DETECTORS[name], name), made(DETECTORS[name], name)
    values = signals(name, heavy_tails())
    everyone = torch.ones(ROWS, dtype=torch.bool)
    for step in range(300):
        detector.judge({k: torch.from_numpy(x[:, step]) for k, x in values.items()}, everyone)
    detector.restart(everyone)
    if DETECTORS[name].keeps:
        return
    for step in range(300, STEPS):
        shown = {k: torch.from_numpy(x[:, step]) for k, x in values.items()}
        for left, right in zip(detector.judge(shown, everyone), fresh.judge(shown, everyone), strict=True):
            assert torch.equal(left.nan_to_num(-1.0), right.nan_to_num(-1.0))


def made(cls: type[Detector], name: str, **given: Any) -> Detector:
    like = {signal: torch.from_numpy(x[:, 0]) for signal, x in signals(name, plateau()).items()}
    return cls(name, [options_of(name, **given)] * ROWS, like, State(ROWS))


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
