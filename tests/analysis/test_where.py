"""`--where`: every command that looks at results takes the same conditions, and says the same of wrong ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis.__main__ import main
from analysis.reading.selection import selected, with_company
from tests.analysis import synthetic

TAKES = {
    "report": ("OUT",),
    "campaign": ("OUT",),
    "incidents": ("OUT",),
    "detectors": ("OUT", "skip_step"),
    "playbooks": ("OUT",),
    "provenance": ("OUT",),
    "figure": ("faulty_against_golden", "OUT", "FILE"),
    "export": ("OUT", "--to", "csv", "--into", "INTO"),
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two mitigations, two bits, their golden twins, and a `last_bit` trial of each twin."""
    faults = [
        synthetic.WeightBit(start=20, bit=30),
        synthetic.WeightBit(start=20, bit=3),
        synthetic.WeightBit(name="last_bit", start=1, bit=0),
    ]
    faulty = [synthetic.make_trial(mitigation=name, fault=fault) for name in ("none", "qk_norm") for fault in faults]

    def loss(trial) -> np.ndarray:
        values = np.linspace(3, 2, 40)
        if getattr(trial.fault, "bit", 0) == 30:
            values[22:] = np.nan
        return values

    synthetic.write_pack(tmp_path / "out", synthetic.with_golden(faulty), loss)
    return tmp_path / "out"


def words(name: str, out: Path) -> list[str]:
    places = {"OUT": str(out), "FILE": str(out.parent / "f.svg"), "INTO": str(out.parent / "into")}
    return [name, *(places.get(word, word) for word in TAKES[name])]


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("bit=7", "error: --where bit=7: unknown key; allowed keys: "),
        ("mitigation=mup", "error: --where mitigation=mup: no trial has it; allowed: none, qk_norm"),
        ("mitigation", "error: --where mitigation: is not KEY=VALUE; allowed keys: "),
    ],
)
def test_a_wrong_condition_is_one_line(name: str, where: str, said: str, out: Path, capsys) -> None:
    assert main([*words(name, out), "--where", where]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(said) and shown.err.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in TAKES if name != "playbooks"])
def test_conditions_are_taken(name: str, out: Path, capsys) -> None:
    status = main([*words(name, out), "--where", "fault_bit=30", "--where", "mitigation=qk_norm"])
    assert status == 0, capsys.readouterr().err


def test_what_trials_are_judged_by_stays_with_them(out: Path) -> None:
    sweep = analysis.open_sweep(out)
    alone = selected(sweep, ["fault_bit=30", "mitigation=qk_norm"])
    kept = with_company(sweep, ["fault_bit=30", "mitigation=qk_norm"])
    assert alone.sizes["trial"] == 1 and set(kept["mitigation"].values) == {"qk_norm"}
    assert sorted(kept["fault"].values) == ["last_bit", "none", "weight_bit"]
    assert with_company(sweep, []) is sweep


def test_incidents_are_those_of_the_chosen_trials(out: Path) -> None:
    every, sweep = analysis.incidents(out), analysis.open_sweep(out)
    names = set(sweep["trial"].values[sweep["mitigation"].values == "qk_norm"])
    chosen = analysis.incidents(out, wheres=["mitigation=qk_norm"])
    assert len(every) == 2 * len(chosen) > 0 and set(chosen["trial"]) <= names
    struck = analysis.incidents(out, wheres=["fault_bit=30"])
    assert set(struck["trial"]) == set(sweep["trial"].values[sweep["fault_bit"].values == 30])
    of_them = every[every["trial"].isin(struck["trial"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(struck, of_them)


def test_pages_say_which_trials_they_are_of(out: Path, capsys) -> None:
    assert main(["report", str(out), "--where", "mitigation=qk_norm"]) == 0
    page = (out / "report.html").read_text()
    assert "<dt>Selected</dt><dd>mitigation=qk_norm, and what is compared with these trials</dd>" in page
    assert "4 trials: " in capsys.readouterr().out
    assert main(["campaign", str(out), "--where", "fault_bit=30,3"]) == 0
    assert "Only trials with fault_bit=30,3." in (out / "campaign.html").read_text()
    assert all(trial in (out / "trials.html").read_text() for trial in analysis.open_sweep(out)["trial"].values)
    assert main(["report", str(out)]) == 0
    assert "<dt>Selected</dt>" not in (out / "report.html").read_text()
