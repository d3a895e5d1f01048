"""`diff OUT TRIAL TRIAL`: what differs between two trials, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from analysis.__main__ import main
from harness.config import Trial
from tests.analysis import synthetic
from tests.analysis.synthetic import RareTokens, WeightBit, make_trial

GOLDEN, WIDE = make_trial(lr=1e-3), make_trial(lr=1e-3, width=64, seed=3)
FAULTY = make_trial(lr=1e-3, fault=WeightBit())
OTHER = make_trial(lr=1e-3, fault=RareTokens())


def losses(trial: Trial) -> np.ndarray:
    loss = synthetic.flat_loss(trial)
    loss[7:] = np.nan if trial is FAULTY else loss[7:]
    return loss


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff") / "out"
    synthetic.write_pack(folder, [GOLDEN, FAULTY, OTHER], losses)
    synthetic.write_pack(folder, [WIDE], losses)
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """Key -> both values, of the lines that have two."""
    assert main(["diff", *words]) == 0
    lines = (line.split() for line in capsys.readouterr().out.splitlines())
    return {line[0]: line[1:] for line in lines if len(line) == 3}


def test_two_configurations(capsys: pytest.CaptureFixture[str], out: Path) -> None:
    """Only what differs, with the path that `sweep` takes; and how both ended."""
    found = told(capsys, str(out), GOLDEN.id, WIDE.id)
    assert found.pop("model.width") == ["32", "64"] and found.pop("seed") == ["0", "3"]
    assert found.pop("final_loss") == ["3", "3"]
    assert {*found} == {"outcome", "nonfinite_step", "masked_step", "strikes", "changes", "final_validation_loss"}


def test_a_fault_against_its_golden_twin(capsys: pytest.CaptureFixture[str], out: Path) -> None:
    """By the first letters of an id. A field that one of them does not have is absent there."""
    found = told(capsys, str(out), FAULTY.id[:6], "golden")
    assert found["fault.name"] == ["weight_bit", "none"] and found["fault.bit"] == ["30", "-"]
    assert found["nonfinite_step"] == ["7", "-"] and found["outcome"] == ["non-finite", "trained"]
    assert not any(key.startswith(("model.", "optim.")) for key in found)


def test_what_they_were_trained_by(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    synthetic.write_pack(tmp_path, [GOLDEN])
    monkeypatch.setitem(synthetic.ENVIRONMENT, "torch", "2.1")
    synthetic.write_pack(tmp_path, [WIDE])
    assert told(capsys, str(tmp_path), GOLDEN.id, WIDE.id)["environment.torch"] == ["2.0", "2.1"]


def test_the_same_trial(capsys: pytest.CaptureFixture[str], out: Path) -> None:
    assert main(["diff", str(out), GOLDEN.id, "golden"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [GOLDEN.id, GOLDEN.id] and lines[1] == "the same trial"


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("zzz", "golden", "TRIAL='zzz': no such trial in .*; allowed: an id, such as "),
        (GOLDEN.id, "", "TRIAL='': no such trial in "),
    ],
)
def test_unknown_trials(capsys: pytest.CaptureFixture[str], out: Path, one: str, other: str, reason: str) -> None:
    assert main(["diff", str(out), one, other]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.match(f"error: {reason}", said.err)


def test_letters_with_which_several_begin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trials = [make_trial(seed=seed) for seed in range(20)]
    synthetic.write_pack(tmp_path, trials)
    letter = max("0123456789abcdef", key=lambda letter: sum(trial.id.startswith(letter) for trial in trials))
    assert main(["diff", str(tmp_path), letter, "golden"]) == 2
    assert " trials begin so; allowed: more of it, as " in capsys.readouterr().err
