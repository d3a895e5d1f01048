"""Symptoms by their written rules, on runs in which each of them stands where it was put."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.measures.symptoms import Rules, Symptom, of_run, symptoms
from analysis.reading.open_sweep import open_sweep
from tests.analysis import synthetic

STEPS, BEGIN = 400, 200


def clean(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 2 + 3 * np.exp(-np.arange(STEPS) / 120) + 0.03 * rng.standard_normal(STEPS)


def norms(seed: int = 1) -> np.ndarray:
    return 1 + 0.1 * np.random.default_rng(seed).standard_normal(STEPS)


def told(loss: np.ndarray, norm: np.ndarray | None = None) -> list[Symptom]:
    return of_run(loss, norms() if norm is None else norm)


def hump(height: float, length: int, half: float) -> np.ndarray:
    """A rise at BEGIN that decays by half each `half` steps, and is over after `length`."""
    since = np.arange(STEPS) - BEGIN
    return np.where((since >= 0) & (since < length), height * 0.5 ** (np.clip(since, 0, None) / half), 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_clean_run_has_none(seed: int) -> None:
    assert told(clean(seed), norms(seed + 100)) == []


@pytest.mark.parametrize(
    ("rise", "name", "least", "most"),
    [
        (hump(5, 400, 3), "spike", 8, 30),
        (hump(0.6, 3, 100), "spike", 2, 2),
        (hump(2, 400, 30), "lingering", 80, 199),
        (hump(2, 400, 120), "lingering", 199, 199),
        (hump(4, 400, 1000), "divergence", 199, 199),
    ],
)
def test_what_becomes_of_a_rise(rise: np.ndarray, name: str, least: int, most: int) -> None:
    loss = clean() - 3 * np.exp(-np.arange(STEPS) / 120) + rise
    (one,) = (one for one in told(loss) if one.symptom != "plateau")
    assert (one.symptom, one.begin) == (name, BEGIN)
    assert least <= one.end - one.begin <= most
    assert one.peak == loss[BEGIN:].max() and one.usual == pytest.approx(2, abs=0.02)


def test_a_run_that_ends_in_nan_diverged() -> None:
    loss = clean() + hump(4, 400, 1000)
    loss[260:] = np.nan
    names = {one.symptom: one for one in told(loss)}
    assert set(names) == {"divergence", "non-finite"}
    assert (names["divergence"].begin, names["non-finite"].begin) == (BEGIN, 260)


def test_one_nan_is_no_rise() -> None:
    loss = clean()
    loss[BEGIN] = np.nan
    assert [(one.symptom, one.begin, one.end) for one in told(loss)] == [("non-finite", BEGIN, BEGIN)]


@pytest.mark.parametrize(("length", "name"), [(1, "spike"), (STEPS - BEGIN, "divergence")])
def test_an_infinite_loss_is_a_rise(length: int, name: str) -> None:
    loss = clean()
    loss[BEGIN : BEGIN + length] = np.inf
    found = {one.symptom: one for one in told(loss)}
    assert set(found) == {"non-finite", name} and found[name].peak == np.inf
    assert (found[name].begin, found[name].end) == (BEGIN, BEGIN + length - 1)


def test_an_infinite_last_step_diverged() -> None:
    assert {one.symptom for one in of_run(np.append(clean()[:30], np.inf), norms()[:31])} == {
        "non-finite",
        "divergence",
    }


def test_steps_keep_their_numbers_after_one_that_was_dropped(tmp_path: Path) -> None:
    loss = clean() + hump(5, 400, 3)
    synthetic.write_pack(tmp_path, [synthetic.make_trial(steps=STEPS)], lambda trial: loss, block=STEPS)
    sweep = open_sweep(tmp_path).load()
    sweep["loss"][0, 50], sweep["dropped"][:] = np.nan, 0
    sweep["dropped"][0, 50] = 4
    (one,) = symptoms(sweep).itertuples()
    assert (one.symptom, one.begin) == ("spike", BEGIN)


def test_gradients() -> None:
    norm = norms()
    norm[BEGIN : BEGIN + 3] *= 40
    norm[300:320] *= 1e-4
    found = told(clean(), norm)
    assert [(one.symptom, one.begin, one.end) for one in found] == [
        ("exploding gradients", BEGIN, BEGIN + 2),
        ("vanishing gradients", 300, 319),
    ]
    assert found[0].peak == norm[BEGIN : BEGIN + 3].max() and found[1].peak == norm[300:320].min()


def test_oscillation() -> None:
    loss = clean()
    loss[BEGIN : BEGIN + 20] += 0.2 * (-1.0) ** np.arange(20)
    (one,) = told(loss)
    assert one.symptom == "oscillation" and one.begin >= BEGIN - 2 and one.end <= BEGIN + 21
    assert one.end - one.begin >= 10


def test_plateau() -> None:
    loss = np.concatenate([clean()[:150], np.full(250, clean()[149]) + 0.001 * clean(3)[:250]])
    (one,) = (one for one in told(loss) if one.symptom == "plateau")
    assert 120 <= one.begin <= 170 and one.end == STEPS - 1


def test_thresholds_are_those_that_are_given() -> None:
    loss = clean() + hump(0.6, 3, 100)
    assert of_run(loss, norms(), Rules(rise=1.0)) == []
