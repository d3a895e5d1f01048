"""`python -m analysis campaign`: its table, its page, what it says of what is missing, and wrong input."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from analysis import open_sweep, outcomes
from analysis.__main__ import main
from analysis.measures.outcomes import OUTCOMES
from analysis.measures.statistics import studied, wilson_interval
from analysis.reports import campaign
from analysis.reports.campaign import write_campaign
from harness.storage.store import open_store
from tests.analysis import synthetic


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, campaign.CampaignReport, list[str]]:
    """A folder, what the command has made of it, and the lines that it printed, none of them a warning."""
    out, made = tmp_path_factory.mktemp("campaign"), []
    synthetic.write_campaign(out, faults=20)

    def write_and_keep(folder: Path, wheres: list[str]) -> campaign.CampaignReport:
        made.append(campaign.write_campaign(folder, wheres))
        return made[0]

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), contextlib.ExitStack() as streams:
        warnings.simplefilter("error")
        patch.setattr("analysis.commands.campaign.write_campaign", write_and_keep)
        printed = streams.enter_context(contextlib.redirect_stdout(io.StringIO()))
        said = streams.enter_context(contextlib.redirect_stderr(io.StringIO()))
        assert (main(["campaign", str(out)]), said.getvalue()) == (0, "")
    return out, made[0], printed.getvalue().splitlines()


@pytest.fixture(scope="module")
def written(commanded) -> tuple[Path, campaign.CampaignReport]:
    return commanded[:2]


@pytest.fixture(scope="module")
def judged(written) -> xr.Dataset:
    return outcomes(open_sweep(written[0]))


def test_the_table_counts_every_fault_once(judged: xr.Dataset) -> None:
    table, faulty = campaign.site_table(judged), studied(judged)
    assert table["site"].tolist() == ["moment_2", "reduced_gradient", "weight", "all sites"]
    whole, sites = table.iloc[-1], table.iloc[:-1]
    for name in ("trials", *OUTCOMES, "silent", "watched", "idle"):
        assert sites[name].sum() == whole[name], name
    assert whole["idle"] == int(faulty["idle"].sum()) > 0
    assert whole["trials"] + whole["idle"] == 120 == faulty.sizes["trial"], "none is unfinished or unjudged"
    assert whole["trials"] == sum(whole[name] for name in OUTCOMES), "a fault that did nothing is none of the five"
    assert whole["silent"] == int(((faulty["visibility"] == "silent") & ~faulty["idle"]).sum())
    for name in (*OUTCOMES, "silent"):
        low, high = wilson_interval(table[name], table["watched" if name == "silent" else "trials"])
        assert (table[f"{name}_low"] == low).all() and (table[f"{name}_high"] == high).all(), name


def test_the_page_holds_the_table_the_figures_and_the_notes(written) -> None:
    out, made = written
    page = made.html.read_text(encoding="utf-8")
    assert made.html == out / "campaign.html" and "<title>campaign: campaign</title>" in page
    names = ["vulnerability_map", "outcome_shares", "deviation_curves", "recovery_against_beta2"]
    assert [picture.name for picture in made.pictures] == names
    assert [picture.path for picture in made.pictures] == [out / "figures" / f"{name}.png" for name in names]
    assert page.count("data:image/png;base64,") == 4 == page.count("<figcaption>") and "<script" not in page
    for cell in made.table.iloc[-1]:
        assert f"<td>{cell}</td>" in page
    assert re.fullmatch(r"\d+ faults idle: never fired, or wrote what was there, and not counted.", made.notes[0])
    assert f"<li>{made.notes[0]}</li>" in page and len(made.notes) == 1
    words = " ".join(page.split("<h2>Figures")[0].split())
    assert "golden range for good" in words and "back inside the clean envelope" in words, "two measures of recovery"


def test_the_command_prints_the_table_and_where_things_are(commanded) -> None:
    out, made, lines = commanded
    assert lines[0].split() == ["site", "N", *OUTCOMES, "silent", "zeros", "idle"]
    assert lines[4].startswith("       all sites") and re.search(r" \d+ = \d+% \[\d+, \d+\] ", lines[4])
    assert f"Note: {made.notes[0]}" in lines and lines[-1] == f"Page: {out / 'campaign.html'}"


def test_how_many_faults_struck_a_number_that_was_zero_is_said(tmp_path: Path) -> None:
    """In the fault's format; of events that do not say so nothing is counted."""
    faulty = [synthetic.make_trial(seed=seed, fault=synthetic.WeightBit(start=20)) for seed in range(5)]
    kinds = [{"was_zero": True}, {"was_zero": True}, {"was_zero": False}, {"was_zero": None}, {}]
    event = {"site": "weight", "tensor": "head", "bit": 3, "changed": True}
    events = {trial.id: [event | kind] for trial, kind in zip(faulty, kinds, strict=True)}
    synthetic.write_pack(tmp_path, synthetic.with_golden(faulty), faults=lambda trial: events.get(trial.id, []))
    sweep = open_sweep(tmp_path)
    shares = dict(zip(sweep["trial"].values, sweep["struck_zero"].values, strict=True))
    assert [shares[trial.id] for trial in faulty[:3]] == [1, 1, 0]
    assert np.isnan([shares[trial.id] for trial in faulty[3:]]).all()
    assert write_campaign(tmp_path).table["zeros"].tolist() == ["67% of 3"] * 2


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, running, orphan, idle = (
        synthetic.make_trial(seed=seed, fault=synthetic.RareTokens(start=20)) for seed in range(4)
    )
    event = {"site": "batch", "tensor": "batch", "bit": None, "changed": True}
    events = {done.id: [event], orphan.id: [event]}
    for trials in (synthetic.with_golden([done, idle]), [orphan]):
        synthetic.write_pack(tmp_path, trials, faults=lambda trial: events.get(trial.id, []))
    synthetic.write_pack(tmp_path, [running.golden, running], steps_done=10, finish=False)
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "vulnerability_map.png").write_bytes(b"old")
    assert main(["campaign", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Note: 1 fault unfinished, and not counted." in text
    assert "Note: 1 fault without a golden run to judge by, and not counted." in text
    assert "Note: 1 fault idle" in text and "Note: clean envelope: a recipe wants at least 8" in text
    assert "vulnerability_map: No figure: no judged fault struck a single bit of a number." in text
    assert not (tmp_path / "figures" / "vulnerability_map.png").exists(), "it would be out of date"
    assert "deviation_curves: No figure: no judged fault moved the loss of its trial." in text
    assert f"outcome_shares: {tmp_path / 'figures' / 'outcome_shares.png'}" in text
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert rows["batch"].split()[1] == "1" and rows["never"].split()[2] == "0" and rows["all"].split()[2] == "1"
    assert [rows[name].split()[-1] for name in ("batch", "never", "all")] == ["0", "1", "1"]


def test_no_fault_is_judged_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = synthetic.make_trial(fault=synthetic.WeightBit(start=20))
    synthetic.write_pack(tmp_path, [trial.golden, trial], steps_done=10, finish=False)
    assert main(["campaign", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("No figure: ") == 4 and "1 fault unfinished" in text


def no_results(out: Path) -> None:
    pass


def no_trials(out: Path) -> None:
    open_store(out, "test")


def only_the_envelope(out: Path) -> None:
    synthetic.write_pack(out, synthetic.with_golden([synthetic.make_trial(fault=synthetic.LastBit(start=3))]))


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (no_results, "holds no results"),
        (no_trials, "no faulty trial"),
        (only_the_envelope, "no faulty trial"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare, reason: str
) -> None:
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["campaign", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert (
        captured.err.startswith(f"error: out={tmp_path}: ") and reason in captured.err and "; allowed: " in captured.err
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = synthetic.make_trial(fault=synthetic.WeightBit(start=20))
    synthetic.write_pack(tmp_path, [trial.golden, trial])
    (tmp_path / "campaign.html").mkdir()
    assert main(["campaign", str(tmp_path)]) == 2
    assert f"error: out={tmp_path}: its campaign.html is not what" in capsys.readouterr().err


def test_what_there_is_to_say_of_the_envelope_is_one_line_beside_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    synthetic.write_campaign(tmp_path, faults=10, beta2s=[0.95], clips=[None], twins=3)
    assert main(["figure", "outcome_shares", str(tmp_path), str(tmp_path / "shares.png")]) == 0
    said = "note: clean envelope: a recipe wants at least 8 finished trials with fault=last_bit; all trials has 3\n"
    shown = f"Figure: {tmp_path / 'shares.png'}\nOutcomes of 10 faults by site"
    printed = capsys.readouterr()
    assert printed.out.startswith(shown) and printed.err == said and not recwarn.list
