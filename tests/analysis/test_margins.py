"""Margins of safety: shares of failures without one part and two, what pairs add, and what each part is worth."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.measures.margins import Margins, margins
from harness.config import ConfigError, Trial
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.yaml_files import text_of, tree_of
from tests.analysis import synthetic
from tests.analysis.mitigated import GOLDEN, LOST, STEPS, Ending, Study

PARTS = {"clip": {"clip": None}, "beta2": {"beta2": 0.999}, "eps and weight_decay": {"weight_decay": 0.0, "eps": 1e-4}}
WHOLE = {"clip": 1.0, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
SEEDS = range(8)
SETS = [frozenset(names) for size in range(3) for names in combinations(PARTS, size)]
FAILING = {  # the seeds that fail without these parts
    frozenset(["clip"]): {0, 1},
    frozenset(["beta2"]): {2},
    frozenset(["clip", "beta2"]): set(SEEDS),
    frozenset(["clip", "eps and weight_decay"]): {0, 1, 3},
}


def trial_of(left_out: frozenset[str], seed: int) -> Trial:
    fields = dict(WHOLE)
    for name in left_out:
        fields |= PARTS[name]
    trial = synthetic.make_trial(32, 1e-2, seed, "none", None, steps=STEPS)
    return dataclasses.replace(trial, optim=dataclasses.replace(trial.optim, **fields))


def left_out_of(trial: Trial) -> frozenset[str]:
    return frozenset(
        name for name, fields in PARTS.items() if all(getattr(trial.optim, key) == fields[key] for key in fields)
    )


def ending(trial: Trial) -> Ending:
    """A seed that fails is lost, or ends by 0.15 nat above the whole recipe; the others by 0.05 at most."""
    if trial.seed in FAILING.get(left_out_of(trial), ()):
        return LOST if trial.seed % 2 else Ending(loss=GOLDEN + 0.15)
    return Ending(loss=GOLDEN + 0.05 * len(left_out_of(trial)) / 3)


def test_stresses_are_told_apart_and_each_is_measured_against_its_own(tmp_path: Path) -> None:
    """Faults have fields of their own, which others lack; under one of them every run ends 1 nat higher."""
    study = Study(tmp_path / "out")
    faults = [None, study.flip(), study.poison()]
    trials = [
        dataclasses.replace(trial_of(left_out, seed), **({"fault": fault} if fault else {}))
        for left_out in SETS
        for seed in SEEDS
        for fault in faults
    ]

    def under_stress(trial: Trial) -> Ending:
        plain = ending(trial)
        return dataclasses.replace(plain, loss=plain.loss + (trial.fault.name == "rare_tokens"))

    study.write_pack(trials, under_stress)
    found = margins(study.sweep)
    assert found.stresses == 3 and set(found.parts) == set(PARTS)
    assert found.share("clip").mean == pytest.approx(2 / 8) and found.share().mean == 0.0


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = Study(tmp_path / "out")
    study.write_pack([trial_of(left_out, seed) for left_out in SETS for seed in SEEDS], ending)
    return study


def test_each_set_and_what_pairs_add(study: Study) -> None:
    found = margins(study.sweep)
    assert set(found.parts) == set(PARTS) and found.stresses == 1
    assert found.sets[0] == frozenset() and set(found.sets) == set(SETS)
    for left_out in SETS:
        assert found.share(*left_out).mean == pytest.approx(len(FAILING.get(left_out, ())) / 8)
    assert found.share_of(1).mean == pytest.approx((2 + 1 + 0) / 24)
    assert found.share_of(2).mean == pytest.approx((8 + 3 + 0) / 24)
    (pair,) = [pair for pair in found.pairs if set(pair) == {"clip", "beta2"}]
    assert found.excess(*pair).mean == pytest.approx(1 - (1 - (1 - 2 / 8) * (1 - 1 / 8)))
    assert [one for one, is_found in found.discoveries.items() if is_found] == [pair]
    one = found.share("clip")
    assert one.low <= one.mean <= one.high and one.low < one.high


def test_two_seeds_discover_nothing() -> None:
    """However much they agree; and where all agree the interval of a share is still wide."""
    sets = (frozenset(), frozenset("a"), frozenset("b"), frozenset("ab"))

    def found(seeds: int) -> Margins:
        return Margins(("a", "b"), sets, np.repeat([[0.0], [0.0], [0.0], [1.0]], seeds, axis=1), 1)

    assert found(2).discoveries == {("a", "b"): False} and found(8).discoveries == {("a", "b"): True}
    whole = found(8).share()
    assert (whole.mean, whole.low) == (0.0, 0.0) and whole.high == pytest.approx(0.324, abs=1e-3)


def test_what_fails_anyway_is_no_excess() -> None:
    """Half of the runs fail whatever is left out; without both parts a quarter more, or all of those that are left."""
    sets = (frozenset(), frozenset("a"), frozenset("b"), frozenset("ab"))

    def excess(*shares: float) -> float:
        return Margins(("a", "b"), sets, np.repeat([[share] for share in shares], 3, axis=1), 1).excess("a", "b").mean

    assert excess(0.5, 0.5, 0.5, 0.5) == pytest.approx(0.0)
    assert excess(0.5, 0.5, 0.5, 0.75) == pytest.approx(0.25)
    assert excess(0.2, 0.6, 0.6, 0.8) == pytest.approx(0.0), "0.2 of 0.8 are left: half of a half"
    assert excess(1.0, 1.0, 1.0, 1.0) == pytest.approx(0.0)
    assert excess(0.4, 0.1, 0.4, 0.1) == pytest.approx(0.0), "leaving a out helps, and b changes nothing"


def test_importance_is_what_a_part_adds_as_the_first_and_the_second() -> None:
    """With two parts it is Shapley's value, which adds up to what fails without both."""
    sets = tuple(frozenset(chosen) for size in range(3) for chosen in combinations("ab", size))
    found = Margins(("a", "b"), sets, np.array([[0.1] * 3, [0.2] * 3, [0.4] * 3, [0.9] * 3]), 1)
    orders = {"a": (0.2 - 0.1, 0.9 - 0.4), "b": (0.4 - 0.1, 0.9 - 0.2)}
    for name, gains in orders.items():
        assert found.importance(name).mean == pytest.approx(np.mean(gains))
    assert sum(found.importance(name).mean for name in "ab") == pytest.approx(0.9 - 0.1)


@pytest.mark.parametrize("parts", [3, 10])
def test_importance_of_parts_without_which_all_fails_is_positive(parts: int) -> None:
    """However many there are; and a part of which nothing depends has none."""
    names = tuple("abcdefghij"[:parts])
    sets = tuple(frozenset(chosen) for size in range(3) for chosen in combinations(names, size))
    failed = np.array([[float(bool(left_out - {"a"}))] * 4 for left_out in sets])
    found = Margins(names, sets, failed, 1)
    assert found.importance("a").mean == 0.0
    for name in names[1:]:
        assert found.importance(name).mean == pytest.approx((1 + 1 / (parts - 1)) / 2), "also after a was left out"


def test_importance_without_pairs_is_what_a_part_does_by_itself() -> None:
    found = Margins(("a", "b"), (frozenset(), frozenset("a"), frozenset("b")), np.array([[0.0], [0.5], [1.0]]), 1)
    assert (found.importance("a").mean, found.importance("b").mean) == (0.5, 1.0)


def test_the_command_tells_and_draws(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "margins.png"
    assert main(["margins", str(study.out), "--figure", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "3 parts, 8 seeds, 1 condition" in said and picture.read_bytes()[:4] == b"\x89PNG"
    assert "The whole recipe fails in 0% of its runs, with one part out in 12%" in said
    assert main(["margins", str(study.out), "--worse", "0.5"]) == 0
    assert "0.125" in capsys.readouterr().out, "only those that are lost: seed 1 without clipping"
    assert main(["margins", str(study.out), "--worse", "-1"]) == 2
    assert "--worse=-1.0: allowed: at least 0" in capsys.readouterr().err


def test_what_is_no_such_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Study(tmp_path / "plain").write()
    with pytest.raises(ConfigError, match="varies 0 parts of a recipe; allowed: 2 at least .* study=margins"):
        margins(plain.sweep)
    headless = Study(tmp_path / "headless")
    headless.write_pack([trial_of(left_out, seed) for left_out in SETS[1:4] for seed in SEEDS], ending)
    with pytest.raises(ConfigError, match="no trial of the whole recipe"):
        margins(headless.sweep)
    assert main(["margins", str(plain.out)]) == 2 and "out=" in capsys.readouterr().err


def test_the_study_leaves_out_each_part_each_pair_and_all() -> None:
    conditions = tree_of(file := FOLDER / "study" / "margins.yaml", text_of(file))["hydra"]["sweeper"]["conditions"]
    parts = [name for name in conditions if "+" not in name and name not in ("whole", "all")]
    pairs = ["+".join(pair) for pair in combinations(parts, 2)]
    assert list(conditions) == ["whole", *parts, *pairs, "all"] and len(conditions) == 57
    assert conditions["whole"] == {}
    for pair in pairs:
        one, other = pair.split("+")
        assert conditions[pair] == conditions[one] | conditions[other]
    assert conditions["all"] == {key: value for part in parts for key, value in conditions[part].items()}
