"""A coordinate check of a recipe, a mitigation and keys: what is trained, what is said of it, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.config import ConfigError
from sweeps.commands.console import run
from sweeps.commands.coordinate_check import finite_runs, slopes
from sweeps.commands.coordinate_trials import CoordinateAxes, own_case
from tests.sweeps.command import write_yaml

FEW = ("--widths=32,64", "--seeds=1", "--steps=2")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], empty: Path):
    """The exit status of a check in an empty folder, and what it prints."""

    def ended(*words: str) -> tuple[int, str, str]:
        status = run(["coordinate-check", *words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return ended


def cases(*words: str) -> dict:
    return {case.name: case for case in CoordinateAxes.of(words, None).cases()}


# --- what is trained ------------------------------------------------------------------------------------------------


def test_a_recipe_and_a_mitigation_are_checked_as_they_are() -> None:
    (case,) = cases("recipe=llama", "mitigation=mup", "optim.lr=3e-3", "model.width=32,64", "seed=4,7").values()
    assert sorted(case.trials) == [32, 64] and [trial.seed for trial in case.trials[32]] == [4, 7]
    trial = case.largest
    assert (trial.recipe, trial.mitigation) == ("llama", "mup")
    assert (trial.model.norm, trial.model.activation) == ("rms", "swiglu")
    assert (trial.model.parametrization, trial.model.zero_head, trial.model.width) == ("mup", False, 64)
    assert (trial.optim.lr, trial.optim.beta2, trial.optim.clip, trial.optim.weight_decay) == (3e-3, 0.95, 1.0, 0.1)
    assert (trial.schedule.warmup, trial.schedule.decay) == (0, "constant")


def test_a_key_alone_changes_that_key_alone() -> None:
    for way, name in (("standard", "standard"), ("mup", "muP")):
        own = own_case(way, "width", (64, 128, 256, 512, 1024), 4, 0.5, 3, "adamw").trials
        assert cases("optim.lr=0.5")[name].trials == own
    deep = cases("model.depth=2,4", "optim.lr=0.5")
    assert deep["CompleteP"].trials == own_case("completep", "depth", (2, 4), 4, 0.5, 3, "adamw").trials


def test_the_rate_follows_the_optimizer_of_the_mitigation() -> None:
    found = cases("mitigation=none,sgd,lion", "model.width=32,64")
    assert [found[f"mitigation={name}"].largest.optim.lr for name in ("none", "sgd", "lion")] == [1e-2, 0.3, 1e-2]


def test_several_values_are_compared() -> None:
    found = cases("recipe=wortsman", "mitigation=none,mup", "optim.eps=1e-8,1e-6", "model.width=32,64")
    names = [f"mitigation={m} optim.eps={eps}" for m in ("none", "mup") for eps in ("1e-08", "1e-06")]
    assert list(found) == names
    assert [case.largest.optim.eps for case in found.values()] == [1e-8, 1e-6] * 2


# --- what is said ---------------------------------------------------------------------------------------------------


def test_table_and_figure_say_what_was_checked(printed) -> None:
    status, out, err = printed("check.svg", "recipe=llama", "mitigation=mup", "optim.lr=3e-3", *FEW)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Exponent of the change after 2 steps of adamw against the width:"
    assert lines[1].split() == ["case", "recipe=llama", "mitigation=mup", "optim.lr=0.003"]
    (told,) = (line for line in lines if line.startswith("Checked: "))
    for word in ("recipe=llama", "mitigation=mup", "optim.lr=0.003", "optim.clip=1.0", "model.width=32,64", "seed=0"):
        assert word in told.split()
    assert lines[-1] == "Figure: check.svg"
    drawn = Path("check.svg").read_text()
    assert "<!-- Checked: recipe=llama mitigation=mup optim.name=adamw optim.lr=0.003" in drawn


def test_the_checks_own_models_are_told_too(printed) -> None:
    status, out, _ = printed("check.svg", *FEW)
    assert status == 0 and "Checked: optim.name=adamw optim.lr=0.01 optim.beta2=0.999" in out
    assert "\nmuP: model.parametrization=mup model.zero_head=true\n" in out
    assert "Checked: optim.name=adamw" in Path("check.svg").read_text()


def test_without_a_file_there_is_a_table_alone(printed, empty: Path) -> None:
    status, out, _ = printed("mitigation=none,qk_norm", *FEW)
    assert status == 0 and out.endswith("Figure: none, because no file was named\n") and not list(empty.iterdir())
    assert "mitigation=none" in out and "mitigation=qk_norm" in out


def test_recipes_and_mitigations_of_ones_own(printed, empty: Path) -> None:
    write_yaml(empty / "mine", "mitigation/small_head.yaml", "model:\n  zero_head: true\n")
    status, out, err = printed("mitigation=small_head", "--config-dir=mine", *FEW)
    assert (status, err) == (0, "") and "Checked: mitigation=small_head " in out and "model.zero_head=true" in out


def test_a_case_without_a_finite_run_is_told(printed) -> None:
    status, out, err = printed("check.svg", "mitigation=none", "optim.lr=1e-2,1e38", *FEW)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "optim.lr=1e+38: no run is finite after 2 steps" in lines
    for row in lines[3:9]:
        assert np.isfinite(float(row.split()[-2])) and row.split()[-1] == "NaN"
    assert "optim.lr=1e+38: no run is finite after 2 steps" in Path("check.svg").read_text()


def table_of(changes: Mapping[tuple[int, int], Sequence[float]]) -> pd.DataFrame:
    """One activation of `standard` after each step, by width and seed."""
    return pd.DataFrame(
        {"case": "standard", "width": width, "seed": seed, "activation": "residual", "step": step, "change": change}
        for (width, seed), run in changes.items()
        for step, change in enumerate(run, 1)
    )


SHORT = own_case("standard", "width", (32, 64, 128), 2, None, 2, "adamw")
STEADY = {(width, seed): (1.0, float(width)) for width in (32, 64, 128) for seed in (0, 1)}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_runs_that_are_not_finite_are_left_out_as_a_whole(bad: float) -> None:
    table, lines = finite_runs(table_of({**STEADY, (64, 1): (9.0, bad)}), [SHORT], "width")
    assert lines == ["standard: 1 of 6 runs not finite after 2 steps, and left out (model.width=64)"]
    found = slopes(table, "width")["standard"]["residual"]
    assert found[1] == pytest.approx(0, abs=1e-12) and found[2] == pytest.approx(1)


def test_one_size_that_is_left_has_no_exponent() -> None:
    lost = {(width, seed): (1.0, math.nan) for width in (64, 128) for seed in (0, 1)}
    table, (line,) = finite_runs(table_of(STEADY | lost), [SHORT], "width")
    assert line.startswith("standard: 4 of 6 runs not finite") and line.endswith("(model.width=64,128)")
    assert slopes(table, "width").isna().all()


def test_nothing_that_moves_is_refused() -> None:
    still = table_of(dict.fromkeys(STEADY, (0.0, 0.0)))
    with pytest.raises(ConfigError, match="--rate=1e-30: nothing moves in 2 steps; allowed: a larger rate"):
        finite_runs(still, [SHORT], "width", "--rate=1e-30")
    assert finite_runs(table_of(STEADY), [SHORT], "width")[1] == []


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED = [
    (("recipe=lama",), "recipe=lama: unknown recipe; did you mean llama? allowed: "),
    (("mitigation=mupp",), "mitigation=mupp: unknown mitigation; did you mean mup? allowed: "),
    (("optim.rl=1",), "optim.rl=1: unknown key; did you mean optim.lr"),
    (("optim.lr=x",), "optim.lr=x: wrong type (str); allowed: a number"),
    (("optim.lr=interval(1,2)",), "optim.lr=interval(1,2): an interval has no values; allowed: "),
    (("optim.lr=1", "optim.lr=2"), "optim.lr=1 optim.lr=2: optim.lr is given twice; allowed: once"),
    (("train.steps=2,3", "mitigation=mup"), "train.steps=2,3: several lengths cannot be compared; allowed: one value"),
    (("fault=weight_bit",), "fault=weight_bit: a coordinate check has no faults; allowed: recipe, mitigation, seed"),
    (("fault.start=3",), "fault.start=3: a coordinate check has no faults; allowed: "),
    (("playbook=repair",), "playbook=repair: a coordinate check answers no alarms; allowed: "),
    (("study=quickstart",), "study=quickstart: a coordinate check is no sweep; allowed: "),
    (("device=cuda",), "device=cuda: belongs to a sweep; allowed: "),
    (("model.start=x",), "model.start=x: stored weights have one size; allowed: "),
    (("model.width=64",), "model.width=64: one size tells of no change; allowed: two or more"),
    (("model.width=32,64", "model.depth=2,4"), "model.width=32,64 model.depth=2,4: allowed: several of one of them"),
    (("model.width=32,64", "--widths=32,64"), "model.width=32,64: --widths says the same; allowed: one of them"),
    (("optim.lr=1", "--rate=1"), "optim.lr=1: --rate says the same; allowed: one of them"),
    (("seed=1", "--seeds=1"), "seed=1: --seeds says the same; allowed: one of them"),
    (("mitigation=mup", "model.parametrization=standard"), "model.parametrization=standard: reaches no trial, because"),
    (("mitigation=batch_warmup",), "schedule.batch_start=2: 8 steps for as many tokens as train.steps=4 of others"),
    (("model.head_dim=48",), "model.width=64: not divisible by model.head_dim=48; allowed: a multiple of it"),
    (("optim.lr=range(1,9)",), "optim.lr=range(1,9): 8 combinations; allowed: at most 4"),
    (("optim.lr=1e38", *FEW), "optim.lr=1e+38: no run is finite after 2 steps; allowed: a smaller rate"),
    (("mitigation=mup", "--config-dir=nowhere"), "--config-dir=nowhere: no such folder; allowed: "),
    (("out=x.bmp", "mitigation=mup"), "stability-harness coordinate-check: argument out: x.bmp: unknown kind of file"),
    (("a.png", "b.png"), "stability-harness coordinate-check: unrecognized arguments: b.png; allowed: "),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_refused_in_one_line(printed, empty: Path, words: tuple[str, ...], said: str) -> None:
    status, out, err = printed(*words)
    assert (status, out) == (2, "") and not list(empty.iterdir())
    assert err.startswith(f"error: {said}") and err.count("\n") == 1
