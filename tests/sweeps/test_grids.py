"""A study of several grids: each has axes beside those of all, and a command line has the last word in all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.measures.conditions import TEST, TUNE, kind_of
from tests.sweeps import command

GRIDS = (
    "# @package _global_\n"
    "hydra:\n"
    "  sweeper:\n"
    "    params: {seed: '0,1', fault.start: 5}\n"
    "    grids:\n"
    "      clean: {}\n"
    "      rates: {optim.lr: '0.1,0.2', seed: 0}\n"
    "      bits: {fault: weight_bit, fault.bit: '3,30', seed: 7}\n"
)


def told(folder: Path, *overrides: str) -> list[tuple[str, float, int]]:
    command.write_yaml(folder, "study/several.yaml", GRIDS)
    found = command.trials(*overrides, study="several", folder=folder)
    return [(trial.fault.name, trial.optim.lr, trial.seed) for trial in found]


def test_the_trials_are_those_of_each_grid_in_turn(tmp_path: Path) -> None:
    assert told(tmp_path) == [
        ("none", 3e-3, 0),
        ("none", 3e-3, 1),
        ("none", 0.1, 0),
        ("none", 0.2, 0),
        ("weight_bit", 3e-3, 7),
        ("weight_bit", 3e-3, 7),
    ]


def test_a_command_line_has_the_last_word_and_equal_trials_are_one(tmp_path: Path) -> None:
    assert told(tmp_path, "seed=9", "optim.lr=0.1", "fault=none") == [("none", 0.1, 9)]


@pytest.mark.parametrize(
    ("grids", "start", "allowed"),
    [
        ("{a: {optim.rl: '1,2'}}", "optim.rl=1,2 (of study=wrong): unknown key", "optim.lr"),
        ("{a: {device: cpu}}", "device=cpu: belongs to the run", "what can be swept"),
        ("{a: {seed: [1, 2]}}", "study=wrong: hydra.sweeper.grids.a.seed: several values in brackets", "commas"),
        ("{a: {_target_: os.mkdir}}", "study=wrong: hydra.sweeper.grids: a._target_=os.mkdir: would be", "no _target_"),
        ("{_target_: {seed: 1}}", "study=wrong: hydra.sweeper.grids: _target_.seed=1: would be", "no _target_"),
        ("{a: 3}", "study=wrong: hydra.sweeper: may not come from a file", "sweeper.grids"),
        ("3", "study=wrong: hydra.sweeper: may not come from a file", "sweeper.grids"),
        (
            "{a: {seed: range(60000)}, b: {seed: 'range(60000,120000)'}}",
            "seed (60,000) and 60,000 of other grids",
            "100,000",
        ),
    ],
)
def test_wrong_grids_are_one_line(empty: Path, grids: str, start: str, allowed: str) -> None:
    command.write_yaml(
        empty / "mine", "study/wrong.yaml", f"# @package _global_\nhydra: {{sweeper: {{grids: {grids}}}}}"
    )
    (line,) = command.refused(empty, "--config-dir=mine", "study=wrong")
    assert line.startswith(f"error: {start}") and "allowed" in line and allowed in line


def test_a_search_wants_one_grid(empty: Path) -> None:
    command.write_yaml(empty / "mine", "study/several.yaml", GRIDS)
    (line,) = command.refused(empty, "--config-dir=mine", "study=several", "search=max_stable_lr")
    assert line.startswith("error: search=max_stable_lr: the study has several grids; allowed: ")


def test_all_grids_are_trained_under_each_condition(tmp_path: Path) -> None:
    """Whose keys stand in place of the study's, and a grid's in place of theirs."""
    conditions = "    conditions: {small: {model.width: 16, optim.lr: '0.3,0.4'}, large: {model.width: 64}}\n"
    command.write_yaml(tmp_path, "study/several.yaml", GRIDS + conditions)
    found = command.trials(study="several", folder=tmp_path)
    told = [(trial.model.width, trial.fault.name, trial.optim.lr) for trial in found]
    assert len(found) == 2 * 2 + 2 + 2 * 2 + 2 + 2 + 2
    assert {rate for width, fault, rate in told if (width, fault) == (16, "weight_bit")} == {0.3, 0.4}
    assert {rate for width, _, rate in told if width == 64} == {3e-3, 0.1, 0.2}
    command.write_yaml(
        tmp_path, "study/several.yaml", "# @package _global_\nhydra: {sweeper: {" + conditions.strip() + "}}\n"
    )
    assert [trial.model.width for trial in command.trials(study="several", folder=tmp_path)] == [16, 16, 64]


def test_what_is_tuned_and_what_judges_it_share_no_condition() -> None:
    """`combined` has its limits from study=detectors_tune; study=detectors shares its recipe, and not its seeds."""

    def told(name: str) -> dict[str, set]:
        found = command.trials(study=name)
        return {
            "recipe": {trial.recipe for trial in found},
            "width": {trial.model.width for trial in found},
            "batch": {(trial.train.batch, trial.model.context) for trial in found},
            "text": {(trial.data.source, trial.data.tokenizer, trial.data.vocabulary) for trial in found},
            "seed": {trial.seed for trial in found},
        }

    tune, mine, test = told("detectors_tune"), told("detectors"), told("detectors_test")
    for what, of_test in test.items():
        assert not of_test & (tune[what] | mine[what]), what
    assert not tune["seed"] & mine["seed"] and tune["recipe"] >= mine["recipe"]


@pytest.mark.parametrize(
    ("name", "kind"), [("detectors", TUNE), ("detectors_tune", TUNE), ("detectors_test", TEST), ("playbook", TUNE)]
)
def test_conditions_are_those_that_are_registered(name: str, kind: str) -> None:
    assert {kind_of(trial.to_dict()) for trial in command.trials(study=name)} == {kind}


@pytest.mark.parametrize("name", ["detectors", "detectors_test", "lead", "module_flips"])
def test_shipped_studies(name: str) -> None:
    """Seeds from 1,000 on are those of study=detectors_tune; every recipe has its clean envelope."""
    found = command.trials(study=name)
    assert name == "detectors_test" or max(trial.seed for trial in found) < 1000
    struck = [trial for trial in found if trial.fault.name not in ("none", "last_bit")]

    def recipes(trials: list) -> set:
        return {(trial.structure, trial.optim, trial.schedule, trial.train) for trial in trials}

    assert recipes(struck) == recipes([trial for trial in found if trial.fault.name == "last_bit"])
    assert all(trial.fault.start < trial.train.steps for trial in struck)
    if name == "detectors":
        assert len(struck) > 900 and len({trial.fault.name for trial in struck}) == 30
        assert sum(trial.fault.name == "none" for trial in found) >= 100
