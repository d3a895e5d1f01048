"""Data, or state? All incidents of a sweep, each read by another run of its recipe that is found by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from analysis import open_sweep
from analysis.__main__ import main
from analysis.reports.crossings import others
from tests.analysis import synthetic
from tests.sweeps import command

SIZES = ["model.width=32", "train.validate_tokens=64"]
START, FAULTS = 60, "none,rare_tokens,weight_bit"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("crossings") / "out"
    words = [*SIZES, "train.steps=90", "optim.lr=1e-2", f"fault={FAULTS}", f"fault.start={START}", "seed=0,1"]
    ended = command.call("-m", *words, "fault.bit=30", f"out={out}", "hydra.launcher.workers=1")
    assert ended.status == 0, ended.err
    return out


def names(sweep: xr.Dataset, **where: object) -> list[str]:
    kept = np.ones(sweep.sizes["trial"], bool)
    for key, value in where.items():
        kept &= sweep[key].values == value
    return [str(name) for name in sweep["trial"].values[kept]]


def test_all_incidents_of_a_sweep_are_told_apart(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cross", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[1:5]]
    assert sorted((row[1], row[-2], row[-1]) for row in rows) == [
        *[("rare_tokens", "data", "data")] * 2,
        *[("weight_bit", "state", "state")] * 2,
    ]
    assert lines[5] == "4 incidents: 2 data, 2 state. 4 of 4 with a fault are right."


def test_a_part_of_them(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cross", str(out), "--where", "fault=rare_tokens", "--most", "1"]) == 0
    printed = capsys.readouterr().out
    assert "1 incident: 1 data, 0 state. 1 of 1 with a fault are right." in printed
    assert "the rest left out: beyond --most 1, not looked at" in printed
    assert main(["cross", str(out), "--where", "fault=none"]) == 0
    assert capsys.readouterr().out == "No incident: there is nothing to cross.\n"


def test_the_other_run_is_chosen(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of another seed and without a fault, whose own batches are others."""
    sweep = open_sweep(out)
    (struck,), (other,) = names(sweep, fault="rare_tokens", seed=0), names(sweep, fault="none", seed=1)
    assert others(sweep)[struck] == other
    assert main(["cross", str(out), struck]) == 0
    assert f"read by {other} as it stands at step {START}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--most", "0"], "error: --most=0: out of range; allowed: 1 or more"),
        (["--from", "abc"], "error: --from=abc: reads the batches of one trial; allowed: beside TRIAL"),
        (["TRIAL", "--where", "seed=0"], "error: --where seed=0: chooses among all trials; allowed: without TRIAL"),
        (["--where", "sed=0"], "error: --where sed=0: unknown key; did you mean seed? allowed keys: "),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = names(open_sweep(out), fault="weight_bit")[0]
    assert main(["cross", str(out), *(trial if word == "TRIAL" else word for word in words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(said) and printed.err.count("\n") == 1


# --- which run reads ------------------------------------------------------------------------------------------------


def test_only_a_sound_run_of_the_same_recipe_reads(tmp_path: Path) -> None:
    """Not one of another width, nor one that was lost; without another seed it is the golden twin, and else nobody."""
    flip = synthetic.WeightBit(start=20)
    lost = synthetic.make_trial(32, seed=1)
    recipes = [synthetic.make_trial(32, seed=0, fault=flip), synthetic.make_trial(32, seed=0), lost]
    wide = [synthetic.make_trial(64, seed=2), synthetic.make_trial(64, 3e-2, seed=0, fault=flip)]

    def outcome(trial: synthetic.Trial) -> str:
        return "divergent" if trial == lost else "trained"

    for trials in (recipes, wide):
        synthetic.write_pack(tmp_path / "out", trials, outcome=outcome)
    found = others(open_sweep(tmp_path / "out"))
    struck, golden, _ = (trial.id for trial in recipes)
    assert found[struck] == golden and golden not in found
    assert wide[1].id not in found, "another rate is another recipe"
    assert found[lost.id] == golden


def test_a_trial_without_another_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = synthetic.make_trial(32, seed=0)
    synthetic.write_pack(tmp_path / "out", [trial])
    assert main(["cross", str(tmp_path / "out"), trial.id]) == 2
    assert "no other run of its recipe was trained to the end; allowed: --from OTHER" in capsys.readouterr().err
