"""The head of a report: what was asked, varied and trained, and the results in at most five sentences."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from analysis import open_sweep
from analysis.reports import report
from harness.basics.version import version
from sweeps.compose.folders import read
from sweeps.compose.hydra_calls import FOLDER
from tests.analysis import synthetic
from tests.sweeps import command


@pytest.mark.usefixtures("unrendered")
def test_a_report_begins_with_what_its_study_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what was varied, when and by which words it was trained; without what belongs to a launcher."""
    asks = "hydra: {sweeper: {params: {optim.lr: '1e-3,1e-2'}}}\nabout: {question: 'Is <b> larger than $a$?'}\n"
    command.write_yaml(tmp_path, "study/mine.yaml", asks)
    monkeypatch.chdir(tmp_path)
    words = command.tiny("--config-dir=.", "study=mine", "out=o", "fault=none", "hydra.launcher.workers=1")
    assert command.call(*words).status == 0
    made = report.write_report(tmp_path / "o")
    page = made.html.read_text(encoding="utf-8")
    assert "<h1>Is &lt;b&gt; larger than $a$?</h1>" in page and made.about.title == "Is <b> larger than $a$?"
    assert made.about.varied == ("lr: 0.001, 0.01",) and "lr: 0.001, 0.01" in page
    assert made.about.command.startswith(f"stability-harness sweep --config-dir={tmp_path} model.width=16 ")
    assert made.about.command.endswith(" study=mine out=o fault=none")
    assert "workers" not in made.about.command and made.about.size == "2 trials in 1 pack"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", made.about.date) and made.about.version.startswith(version())
    assert made.about.next_command == f"stability-harness watch {tmp_path / 'o'}"
    assert "<h2>Faults</h2>" not in page, "there are none"


@pytest.mark.parametrize("study", sorted(path.stem for path in (FOLDER / "study").glob("*.yaml")))
def test_every_shipped_study_asks_something(study: str) -> None:
    asked = read(FOLDER, "study", study).about.question
    assert study == "grid" or (asked.endswith("?") and len(asked) < 110)


def test_a_summary_is_short_and_names_no_trial(realistic: Path, tmp_path: Path) -> None:
    shutil.copytree(realistic, tmp_path / "sweep")
    made = report.write_report(tmp_path / "sweep")
    assert 3 <= len(made.summary) <= 5
    names = set(open_sweep(made.html.parent)["trial"].values)
    assert not any(name in line for line in made.summary for name in names)
    rates, deviation, losses, faults = made.summary[1:]
    assert deviation.startswith("Worst deviation over the faults at width 128: ")
    assert rates.startswith("Largest stable learning rate at width 128") and "a factor of" in rates
    assert losses.startswith("qk_norm: LR sensitivity at width 128 0.22 [")
    assert (
        faults.startswith("Away from their golden twins, over mitigations none, qk_norm: rare_tokens moved ")
        and "; weight_bit moved " in faults
    )


def test_many_faults_and_seeds_are_one_sentence(tmp_path: Path) -> None:
    faulty = [
        synthetic.make_trial(fault=synthetic.WeightBit(name=f"f{kind}", start=20, bit=bit), seed=seed)
        for kind in range(5)
        for bit in range(2)
        for seed in range(2)
    ]
    synthetic.write_pack(tmp_path, synthetic.with_golden(faulty))
    lines = report.write_report(tmp_path).summary
    assert len(lines) <= 5 and any("; 2 more faults." in line for line in lines)


@pytest.mark.usefixtures("unrendered")
def test_one_seed_is_said_once(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(lr=lr, mitigation=name) for lr in (1e-3, 1e-2) for name in ("none", "qk_norm")]
    synthetic.write_pack(tmp_path, trials)
    made = report.write_report(tmp_path)
    assert made.summary[-1] == "One seed, so there are no intervals, and no difference can be told."
    assert sum("One seed, so" in line for line in made.findings) == 1
