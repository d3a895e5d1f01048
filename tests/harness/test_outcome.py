"""The written criterion of how a run ended, at its edges."""

from __future__ import annotations

import numpy as np
import pytest

from harness.objectives.outcome import DIVERGENT, NEVER_LEARNED, NON_FINITE, TRAINED, judge


def run(*stretches):
    """A loss curve from (value, steps) pairs."""
    return np.concatenate([np.full(steps, value, dtype=float) for value, steps in stretches])


FALLING = np.linspace(5.0, 2.0, 100)

CASES = [
    ("falls", FALLING, TRAINED),
    ("never moves", run((5.0, 100)), TRAINED),
    ("one step", run((5.0, 1)), TRAINED),
    ("two steps, up", np.array([5.0, 5.5]), NEVER_LEARNED),
    ("rises from the start", np.linspace(5.0, 6.0, 100), NEVER_LEARNED),
    ("never learns, ends a little above its start", run((5.0, 95), (5.001, 5)), NEVER_LEARNED),
    ("ends 1.5 times as high as it began", run((5.0, 50), (7.5, 50)), NEVER_LEARNED),
    ("ends higher still", run((5.0, 50), (7.501, 50)), DIVERGENT),
    ("learned for a tenth of the run, ends a little above its start", run((5.0, 5), (4.0, 10), (5.1, 85)), DIVERGENT),
    # Learned 5 -> 1, so at the end 3 is half of it lost.
    ("loses a little less than half", run((5.0, 10), (1.0, 85), (2.999, 5)), TRAINED),
    ("loses exactly half", run((5.0, 3), (1.0, 16), (3.0, 1)), TRAINED),
    ("loses a little more than half", run((5.0, 10), (1.0, 85), (3.001, 5)), DIVERGENT),
    ("blows up and comes back", run((5.0, 10), (1.0, 40), (50.0, 45), (1.5, 5)), TRAINED),
    ("a spike of one step before the end", run((5.0, 10), (1.0, 89), (10.0, 1)), TRAINED),  # 0.8 x 1 + 0.2 x 10 = 2.8
    ("a larger spike at the end", run((5.0, 10), (1.0, 89), (11.1, 1)), DIVERGENT),  # the window's mean is 3.02
    ("a dip of one step is not the best", run((5.0, 50), (1.0, 1), (4.0, 44), (4.1, 5)), TRAINED),  # the best is 3.4
    ("the window is one step in a short run", run((5.0, 3), (1.0, 6), (3.1, 1)), DIVERGENT),
    ("huge but finite", run((5.0, 50), (1e38, 50)), DIVERGENT),
]


@pytest.mark.parametrize(("loss", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_outcome(loss, expected):
    assert judge(loss, None) == expected


@pytest.mark.parametrize("loss", [FALLING, np.array([np.nan]), np.append(FALLING, [np.inf, np.nan])])
def test_a_run_that_stopped_being_finite(loss):
    assert judge(loss, 3) == NON_FINITE


def test_the_window_is_a_twentieth_of_the_run():
    """20 steps: the last one alone. 60 steps: the mean of the last three."""
    tail = [3.0, 3.0, 9.0]
    assert judge(np.concatenate([[9.0], np.full(16, 1.0), tail]), None) == DIVERGENT
    assert judge(np.concatenate([[9.0], np.full(56, 1.0), tail]), None) == TRAINED


@pytest.mark.parametrize("noise", [0.003, 0.03, 0.3])
def test_a_run_at_its_first_loss_has_never_learned_whatever_its_noise(noise: float) -> None:
    """A window below the first loss by chance is nothing learned; judged by that, half of them were divergent."""
    draw = np.random.default_rng(11)
    told = [judge(5 + noise * draw.standard_normal(200), None) for _ in range(200)]
    assert told.count(DIVERGENT) <= 2 and told.count(NEVER_LEARNED) > 20


# --- the noise of the run's own loss -----------------------------------------------------------------------------

LENGTHS = (20, 60, 150, 1000)
NOISES = {  # and the share of runs of 150 steps and more, and of shorter ones, that may be called divergent
    "normal": (lambda draw, n: draw.standard_normal(n), 0.01, 0.01),
    "student": (lambda draw, n: draw.standard_t(3, n), 0.02, 0.05),
    "lognormal": (lambda draw, n: np.exp(draw.standard_normal(n)), 0.03, 0.08),
    "wandering": (
        lambda draw, n: np.convolve(draw.standard_normal(n + 20), 0.8 ** np.arange(20), "valid")[:n],
        0.04,
        0.12,
    ),
}


@pytest.mark.parametrize("kind", NOISES)
def test_a_run_with_nothing_left_to_learn_is_not_divergent_by_the_noise_of_a_batch(kind: str) -> None:
    """Judged by the first loss alone, six in ten were."""
    noise, long, short = NOISES[kind]
    level = 0.0 if kind == "normal" else 3.0  # a loss without a sign of its own, as a critic's or a reward's is
    draw = np.random.default_rng(7)
    for length in LENGTHS:
        told = [judge(level + 0.3 * noise(draw, length), None, is_untrained=False) for _ in range(400)]
        assert told.count(DIVERGENT) <= 400 * (long if length >= 150 else short), length


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("end", [5.5, 8.0, 1e30])
def test_noise_does_not_hide_a_divergence(noise: float, end: float) -> None:
    """Early, in the middle or late, after it the losses of steps ten times as far from each other."""
    draw = np.random.default_rng(3)
    for broken in (30, 100, 180):
        for _ in range(50):
            loss = 3 + 2.5 * np.exp(-np.arange(200) / 10) + noise * draw.standard_normal(200)
            loss[broken:] = end + 0.3 * (end - 3) * draw.standard_normal(200 - broken)
            assert judge(np.abs(loss), None, is_untrained=False) == DIVERGENT
    at_once = 5.5 + noise * draw.standard_normal(200) + np.minimum(np.arange(200), 2)
    assert judge(at_once, None, is_untrained=False) == DIVERGENT
