"""Where first non-finite values came from: from the command line to the table, and how often the blame is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import analysis
from analysis.__main__ import main
from harness.storage.pack_info import PROVENANCE
from tests.sweeps import command

CAMPAIGN = ["fault=bit_flip", "fault.site=weight,activation,moment_1,moment_2,reduced_gradient", "fault.samples=8"]
CAMPAIGN += ["fault.bit=30,31", "fault.start=3", "fault.until=9", "train.steps=14", "campaign.envelope=0"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small campaign at the bits that break most runs."""
    folder = tmp_path_factory.mktemp("campaign") / "out"
    ended = command.call(f"out={folder}", *command.tiny("-m", *CAMPAIGN))
    assert ended.status == 0, ended.err
    return folder


@pytest.fixture(scope="module")
def sweep(out: Path) -> xr.Dataset:
    return analysis.open_sweep(out).load()


def test_the_blame_is_on_what_was_struck(sweep: xr.Dataset) -> None:
    table = analysis.named(sweep).set_index("site")
    assert table.loc["all", "trials"] == table.drop("all")["trials"].sum() >= 8, "this says nothing"
    assert {"activation", "weight"} <= set(table.index)
    assert table.loc["all", "share"] >= 0.95, table
    assert (table["low"] < table["share"]).all() and (table["high"] == 1).all()


def test_every_lost_trial_has_a_record(sweep: xr.Dataset) -> None:
    table, lost = analysis.provenance(sweep), np.isfinite(sweep["nonfinite_step"].values)
    assert list(table["trial"]) == list(sweep["trial"].values[lost]) and len(table)
    assert set(PROVENANCE) <= set(table.columns)
    assert np.isnan(sweep["provenance_step"].values[~lost]).all() and (sweep["provenance_cause"][~lost] == "").all()
    late = table["direction"] == "update"
    assert (table["step"] == table["nonfinite_step"] - late).all() and late.any() and not late.all()
    assert table["cause"].isin(["strike", "overflow", "0/0", "inf - inf", "invalid"]).all()
    inside = table["tensor"].str.startswith("blocks.")
    layers = table["tensor"].str.extract(r"blocks\.(\d+)\.")[0][inside]
    assert (table["layer"][inside].astype(int) == layers.astype(int)).all() and table["layer"][~inside].isna().all()


def test_it_is_printed(out: Path, sweep: xr.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    table = analysis.provenance(sweep)
    assert main(["provenance", str(out)]) == 0
    said = capsys.readouterr().out
    assert all(trial in said for trial in table["trial"]) and "95% Wilson intervals" in said
    one = table.iloc[0]
    assert main(["provenance", str(out), one["trial"][:8]]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["trial"] == one["trial"] and lines["blamed"] == one["blamed"] and lines["cause"] == one["cause"]


def test_a_trial_that_was_finite_has_none(out: Path, sweep: xr.Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    trained = str(sweep["trial"].values[sweep["outcome"].values == "trained"][0])
    assert main(["provenance", str(out), trained]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: TRIAL={trained}: no trial that was not finite in out={out}; allowed: ")
    assert main(["provenance", str(out), ""]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "begins the ids of" in line


NAN = ["fault=nan_gradient", "fault.start=4", "fault.site=activation", "fault.tensor=*.up", "fault.elements=1"]


def test_it_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = command.tiny(*NAN, "train.steps=8")
    found = {}
    for wanted in ("true", "false"):
        assert command.call(f"out={tmp_path / wanted}", *run, f"telemetry.provenance={wanted}").status == 0
        found[wanted] = analysis.open_sweep(tmp_path / wanted).load()
    with_it, without = found.values()
    assert list(with_it["trial"].values) == list(without["trial"].values), "it is no part of ids"
    assert np.array_equal(with_it["loss"].values, without["loss"].values, equal_nan=True)
    assert "strike" in with_it["provenance_cause"] and (without["provenance_cause"] == "").all()
    capsys.readouterr()
    assert main(["provenance", str(tmp_path / "false")]) == 0
    assert analysis.named(without).set_index("site").loc["all", "trials"] == 0


def test_ranks_that_are_processes_find_the_same(tmp_path: Path) -> None:
    run = command.tiny(*NAN, "train.ranks=2", "train.batch=4", "train.steps=8", "fault.rank=1")
    tables = []
    for how in ("simulated", "processes"):
        ended = command.call(f"out={tmp_path / how}", *run, f"ranks={how}")
        assert ended.status == 0, ended.err
        tables.append(analysis.provenance(analysis.open_sweep(tmp_path / how)))
    simulated, processes = tables
    assert simulated.equals(processes) and list(simulated["rank"]) == [1] and list(simulated["cause"]) == ["strike"]
