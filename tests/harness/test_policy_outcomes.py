"""How the run of a policy ends: hacked, degenerate, or unknown where nobody has looked; beside the reward alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.objectives.outcome import (
    DEGENERATE,
    DIVERGENT,
    HACKED,
    NEVER_LEARNED,
    NON_FINITE,
    TRAINED,
    UNKNOWN,
    judge_policy,
)
from harness.testing import engine

ROLLOUTS = 200
X = np.linspace(0, 1, ROLLOUTS)
NOISE = 0.001 * np.random.default_rng(0).standard_normal((2, ROLLOUTS))
GAIN = 0.1 + np.minimum(X, 0.5)  # of 0.5
VARIED = {"token_entropy": 3 - X, "distinct": 1 - 0.5 * X, "repeated": 0.5 * X}
RISING = np.minimum(X, 0.9) + NOISE[1]


def ending(values: np.ndarray, last: float) -> np.ndarray:
    """With this in the last window of 5%."""
    return np.where(np.arange(ROLLOUTS) < 0.95 * ROLLOUTS, values, last)


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [
        ({}, TRAINED),
        ({"token_entropy": ending(VARIED["token_entropy"], 0.14)}, DEGENERATE),  # of 3 at the start
        ({"token_entropy": ending(VARIED["token_entropy"], 0.155)}, TRAINED),
        ({"distinct": ending(VARIED["distinct"], 0.09)}, DEGENERATE),
        ({"distinct": ending(VARIED["distinct"], 0.11)}, TRAINED),
        ({"repeated": ending(VARIED["repeated"], 0.91)}, DEGENERATE),
        ({"repeated": ending(VARIED["repeated"], 0.89)}, TRAINED),
        ({"distinct": np.full(ROLLOUTS, np.nan)}, UNKNOWN),
        ({name: np.where(np.arange(ROLLOUTS) % 7, np.nan, values) for name, values in VARIED.items()}, TRAINED),
    ],
)
def test_a_policy_that_says_the_same_is_degenerate(changed: dict[str, np.ndarray], outcome: str) -> None:
    reward, read = GAIN + NOISE[0], VARIED | changed
    assert judge_policy(reward, read, None) == outcome
    assert judge_policy(reward, read, 3) == NON_FINITE
    assert judge_policy(reward - 2 * np.maximum(X - 0.6, 0), read, None) == DIVERGENT
    assert judge_policy(0.1 + NOISE[0], read, None) == NEVER_LEARNED


def fallen(share: float) -> np.ndarray:
    """A gold reward whose means over windows have lost so much of their gain, of 0.5, at the end."""
    return GAIN - 0.5 * share * np.clip((X - 0.6) / 0.3, 0, 1) + NOISE[0]


@pytest.mark.parametrize(
    ("gold", "proxy", "outcome"),
    [
        (fallen(0.12), RISING, HACKED),
        (fallen(0.08), RISING, TRAINED),
        (fallen(0.3), np.minimum(X, 0.5) + NOISE[1], TRAINED),  # both have stopped
        (fallen(0.8), RISING, HACKED),
        (fallen(0.8), fallen(0.8), DIVERGENT),
        (0.5 - 0.4 * X + NOISE[0], RISING, HACKED),  # there never was a gain
        (0.1 + NOISE[0], RISING, NEVER_LEARNED),
        (fallen(0.3), np.full(ROLLOUTS, np.nan), UNKNOWN),
    ],
)
def test_a_policy_is_hacked_where_gold_falls_while_the_proxy_rises(
    gold: np.ndarray, proxy: np.ndarray, outcome: str
) -> None:
    assert judge_policy(gold, VARIED | {"proxy": proxy}, None) == outcome
    alike = {name: ending(values, 0.0) for name, values in VARIED.items()}
    of_alike = DEGENERATE if outcome == TRAINED else outcome
    assert judge_policy(gold, alike | {"proxy": proxy}, None) == of_alike


BASE: dict[str, Any] = {"objective": {"name": "policy"}, "context": 15, "batch": 16, "steps": 120, "lr": 1e-2}
BASE |= {"warmup": 1, "decay": "constant", "policy.count": {"token": 3}}


def policies(options: dict[str, Any], **fields: Any) -> engine.Run:
    of = {"reward": "count", "group": 4, "prompt": 3, **options}
    return engine.run([engine.trial(**{**BASE, "policy": of, "seed": seed, **fields}) for seed in range(2)], block=50)


def test_one_token_alone_is_degenerate_and_unknown_if_nobody_looks() -> None:
    assert policies({}).result.outcome == [DEGENERATE] * 2
    assert policies({}, signals={"rollouts": 7}).result.outcome == [DEGENERATE] * 2
    assert policies({}, signals={"rollouts": 0}).result.outcome == [UNKNOWN] * 2
    assert policies({"updates": 3}, steps=360, signals={"rollouts": 4}).result.outcome == [DEGENERATE] * 2


def test_a_reward_of_few_labels_is_hacked() -> None:
    options = {"reward": "quality", "proxy": 30}
    run = policies(options)
    assert run.result.outcome == [HACKED] * 2
    assert policies(options, signals={"proxy": 0}).result.outcome == [UNKNOWN] * 2
    assert policies({"reward": "quality"}).result.outcome == [TRAINED] * 2
