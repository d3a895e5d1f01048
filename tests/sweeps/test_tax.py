"""What a stored recipe costs, measured by training a few steps of it again by turns with another."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from analysis import open_sweep
from analysis.__main__ import main
from analysis.again.batches import reading_of
from analysis.again.step_costs import recipe_costs
from harness.config import ConfigError
from harness.model.determinism import SETTINGS
from tests.analysis import synthetic
from tests.sweeps import command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tax") / "out"
    words = ["train.steps=24", "train.validate_every=4", "mitigation=none,qk_norm,lion", "seed=0,1"]
    assert command.call(*command.tiny("-m", *words, "playbook=none,repair", f"out={out}")).status == 0
    return out


def test_costs_of_a_recipe_are_those_of_its_state(trained: Path) -> None:
    """Lion keeps one moment, AdamW two: three arrays of the weights' size against two, and what a step needs beside."""
    table = open_sweep(trained)

    def of(mitigation: str) -> str:
        is_it = (table["mitigation"] == mitigation) & (table["playbook"] == "none")
        return str(table["trial"].values[is_it.values][0])

    before = [setting.read() for setting in SETTINGS]
    lion, adam = recipe_costs(*(reading_of(trained, of(name)) for name in ("lion", "none")), 2, "cpu")
    assert [setting.read() for setting in SETTINGS] == before
    assert lion.state / adam.state == pytest.approx(2 / 3, rel=0.05) and min(lion.memory, adam.memory) > lion.state
    assert len(lion.seconds) == 2 and (lion.seconds > 0).all() and lion.write > 0


@pytest.mark.parametrize("axis", ["mitigation", "playbook"])
def test_the_command_tells_all_of_it(axis: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ["--per-hour", "2", "--devices", "8", "--seconds", "3", "--steps", "1000", "--lost-steps", "50"]
    main(["tax", str(trained), "--axis", axis, "--rounds", "2", *inputs, "--between-failures", "5", "--write", "40"])
    printed = capsys.readouterr().out
    assert f"against {axis}=none" in printed
    (head, *_) = [line for line in printed.splitlines() if line.split()[:2] == [axis, "rate"]]
    wanted = "rate time steps total memory state failed without cost even incidents price"
    assert head.split() == [axis, *wanted.split()]
    assert "A run without: 1000 steps of 3 s on 8 devices, 13.33." in printed
    assert "takes 40 s: with a failure in 5 hours one is due every 1.2e+03 s" in printed


def test_without_rounds_nothing_is_trained(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.reports.tax.recipe_costs", None)
    main(["tax", str(trained), "--rounds", "0", "--where", "playbook=none"])
    printed = capsys.readouterr().out
    assert "time" not in printed.split("Each at")[0] and "lion" in printed
    assert "No step was timed." in printed and "rounds by turns" not in printed and "memory" not in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "1"], "--rounds=1: out of range"),
        (["--per-hour", "nan"], "--per-hour=nan: out of range; allowed: a number above 0"),
        (["--lost-steps", "-3"], "--lost-steps=-3.0: out of range"),
        (["--axis", "lr"], "--axis lr: unknown; allowed: mitigation, "),
        (["--device", "tpu"], "device=tpu: unknown; allowed: auto, cpu, cuda"),
        (["--axis", "precision"], "--axis precision: unknown; allowed: mitigation, "),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tax", str(trained), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_is_too_short_is_named(tmp_path: Path) -> None:
    out = tmp_path / "short"
    assert command.call(*command.tiny("-m", "train.steps=4", "mitigation=none,qk_norm", f"out={out}")).status == 0
    readings = [reading_of(out, str(name)) for name in open_sweep(out)["trial"].values]
    with pytest.raises(ConfigError, match=r"train\.steps=4: too short; allowed: 6 or more"):
        recipe_costs(*readings, 2, "cpu")


def test_the_own_fault_of_a_run_is_not_timed(trained: Path) -> None:
    """The trial that is timed is the golden one: a strike would be in its time."""
    reading = reading_of(trained, str(open_sweep(trained)["trial"].values[0]))
    fault = dataclasses.replace(reading.trial, fault=synthetic.WeightBit(start=2))
    assert dataclasses.replace(reading, trial=fault).clean.trial == reading.trial
