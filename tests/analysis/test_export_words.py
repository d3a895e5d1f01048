"""`export`: what is wrong is one line; names and pages of a stranger do no harm; nothing asks a network."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import filelock
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from analysis import incidents, open_sweep
from analysis.export import runs
from analysis.export.names import cell, former_name, key, sweep_name, text
from analysis.export.pages import SEAL
from analysis.export.targets import mlflow as mlflow_target
from harness.storage.results_folder import ResultsPath
from tests.analysis import synthetic
from tests.analysis.exporting import (
    check_equal,
    environment,
    export,
    no_network,
    out,
    said,
    target,
    tracker,
    usable,
    waits,
)
from tests.analysis.test_strangers_names import EVIL, Odd
from tests.analysis.tracked import LIBRARIES, READ, TRACKERS, is_in_ci

__all__ = ["environment", "no_network", "out", "target", "tracker"]  # fixtures


ROOT = Path(__file__).parent.parent.parent


# --- which trials, and where -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "trials"),
    [
        (["fault=none"], 6),
        (["lr=0.01,1.0"], 8),
        (["lr=1e-2", "fault=weight_bit"], 2),
        (["complete=false"], 4),
        (["fault_bit=nan"], 6),
        (["mitigation=none", "seed=1", "outcome=trained"], 4),
    ],
)
def test_trials_are_chosen(out: Path, words: list[str], trials: int) -> None:
    export(out, "csv", *(part for word in words for part in ("--where", word)))
    assert len(READ["csv"](out.parent / "place")) == trials


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--where", "widht=32"], "--where widht=32: unknown key; did you mean width? allowed keys: trial, "),
        (["--where", "width"], "--where width: is not KEY=VALUE; allowed keys: trial,"),
        (["--where", "lr=0.5"], "--where lr=0.5: no trial has it; allowed: 0.001, 0.01, 1.0"),
        (["--where", "lr=0.01,x"], "--where lr=x: no trial has it; allowed: 0.001"),
        (["--where", "lr=1", "--where", "complete=false"], "no trial is all of that"),
        (["--signals", "los"], "--signals los: unknown; did you mean loss? allowed: loss, validation"),
    ],
)
def test_what_no_trial_has_is_one_line(out: Path, words: list[str], told: str) -> None:
    (line,) = said(["export", str(out), "--to", "csv", "--into", str(out.parent / "place"), *words], 2)
    assert line.startswith("error: ") and told in line
    assert not (out.parent / "place").exists()


def test_where_it_goes_by_default(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(out.parent)
    said(["export", "out", "--to", "csv"], 0)
    (folder,) = (out.parent / "export" / "csv").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["curves.csv", "events.csv", "trials.csv"]


def names_in(place: Path) -> set[str]:
    """Names of the sweeps that a place has, as its files and folders and MLflow's experiments have them."""
    found = {
        re.sub(r"(-pages|\.nc|\.db.*|\.lock)$", "", path.name) for path in place.iterdir() if re.search(END, path.name)
    }
    if (file := place / "mlflow.db").exists():
        with contextlib.closing(sqlite3.connect(file)) as tables:
            found |= {name for (name,) in tables.execute("SELECT name FROM experiments") if re.search(END, name)}
    return {name for name in found if not name.startswith("exported-")}


END = r"-[0-9a-f]{8}"


def test_a_sweep_has_the_name_of_its_folder_and_keeps_it(out: Path, target: str) -> None:
    """That of the folder when it was first exported to a place: one that is renamed is no other sweep."""
    place, id = out.parent / "place", ResultsPath.open(out).id[:8]
    renamed = out.rename(out.parent / "mine")
    study = open_sweep(renamed).attrs["study"]
    told = " ".join(export(renamed, target))
    name = f"mine-{key(study)}-{id}"
    assert names_in(place) == {name} and name in told
    export(renamed.rename(out.parent / "other"), target)
    assert names_in(place) == {name}
    assert sweep_name("grid", "grid", id) == former_name("grid", id) == f"grid-{id}", "results/STUDY, as before"


@pytest.mark.parametrize("told", [{}, {"name": "../elsewhere"}], ids=["", "changed"])
def test_what_an_earlier_version_has_exported_goes_on(
    out: Path, target: str, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, id = out.parent / "place", ResultsPath.open(out).id[:8]
    with monkeypatch.context() as earlier:
        earlier.setattr(runs, "sweep_name", lambda folder, study, id: former_name(study, id))
        export(out, target)
    for file in place.glob("exported-*.json"):  # which had no name in it
        old = {key: value for key, value in json.loads(file.read_text()).items() if key != "name"}
        file.write_text(json.dumps(old | told))
    (before,) = names_in(place)
    said = export(out, target)
    assert names_in(place) == {before} == {f"{key(open_sweep(out).attrs['study'])}-{id}"}
    assert target not in TRACKERS or "nothing new" in said[0]


def test_mlflow_ui_is_told_with_what_it_needs(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra brings MLflow without its server."""
    usable("mlflow", monkeypatch, out.parent)
    known, there = importlib.util.find_spec, {"flask": False}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: there.get(name) or known(name, *more))
    if known("flask") is None:
        assert "`pip install mlflow` (the server) and then `mlflow ui --backend-store-uri " in export(out, "mlflow")[-1]
    there["flask"] = True
    assert "look at it with `mlflow ui --backend-store-uri sqlite:///" in export(out, "mlflow")[-1]


def test_a_results_folder_is_no_place(out: Path) -> None:
    (out.parent / "link").symlink_to(out)
    for place in (out, out / "export", out.parent / "link" / "export"):
        (line,) = said(["export", str(out), "--to", "csv", "--into", str(place)], 2)
        assert "lies in the results folder" in line
    assert not (out / "export").exists()


def test_a_place_that_cannot_be(out: Path) -> None:
    (out.parent / "file").write_text("")
    (line,) = said(["export", str(out), "--to", "csv", "--into", str(out.parent / "file")], 2)
    assert line.startswith(f"error: --into {out.parent / 'file'}: cannot be written")


def test_no_results_and_no_target(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (line,) = said(["export", str(tmp_path / "none"), "--to", "csv", "--into", str(tmp_path / "place")], 2)
    assert "holds no results" in line
    (line,) = said(["export", str(tmp_path), "--to", "excel"], 2)
    assert "excel" in line and "mlflow" in line


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_one_line(out: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = "pyarrow.parquet" if name == "parquet" else LIBRARIES[name]  # pandas itself imports pyarrow
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    (line,) = said(["export", str(out), "--to", name, "--into", str(out.parent / "place")], 2)
    assert line.startswith(f"error: --to {name}: {LIBRARIES[name]}") and f"stability-harness[{name}]" in line


def test_no_library_is_imported_before_it_is_asked_for(out: Path) -> None:
    libraries = [name for name in LIBRARIES.values() if name != "pyarrow"]  # which pandas looks for by itself
    code = (
        f"import sys, analysis.__main__ as m; m.main(sys.argv[1:]); print(sorted({{*{libraries}}} & {{*sys.modules}}))"
    )
    words = [sys.executable, "-c", code, "export", str(out), "--to", "csv", "--into", str(out.parent / "place")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- a place that is in use, or damaged --------------------------------------------------------------------------


def test_two_exports_at_once(out: Path, tracker: str) -> None:
    place = out.parent / "place"
    place.mkdir()
    with filelock.FileLock(place / f"exported-{ResultsPath.open(out).id}.lock"):
        (line,) = said(["export", str(out), "--to", tracker, "--into", str(place)], 2)
    assert "another export writes there" in line


@pytest.mark.parametrize("content", ["{", "[]", '{"marks": {"x": 3}}', '{"marks": {}, "open": ["x"]}'])
def test_a_damaged_note_of_what_was_exported(out: Path, tracker: str, content: str) -> None:
    place = out.parent / "place"
    place.mkdir()
    (place / f"exported-{ResultsPath.open(out).id}.json").write_text(content)
    (line,) = said(["export", str(out), "--to", tracker, "--into", str(place)], 2)
    assert line.startswith(f"error: --into {place}: ")


def test_a_database_that_is_none(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usable("mlflow", monkeypatch, tmp_path)
    place = out.parent / "place"
    place.mkdir()
    (place / "mlflow.db").write_bytes(b"not a database, but long enough to look at" * 100)
    (line,) = said(["export", str(out), "--to", "mlflow", "--into", str(place)], 2)
    assert line.startswith(f"error: --into {place}: its mlflow.db is no database")


def test_a_database_of_another_mlflow(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usable("mlflow", monkeypatch, tmp_path)
    export(out, "mlflow")
    with contextlib.closing(sqlite3.connect(out.parent / "place" / "mlflow.db")) as tables:
        tables.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        tables.commit()
    words = ["export", str(out), "--to", "mlflow", "--into", str(out.parent / "place")]
    done = subprocess.run([sys.executable, "-m", "analysis", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: --into {out.parent / 'place'}: MLflow cannot use its mlf")


@pytest.mark.parametrize("name", ["a?b=1", "a%20b"])
def test_a_place_that_mlflow_would_take_for_another(
    out: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usable("mlflow", monkeypatch, tmp_path)
    (line,) = said(["export", str(out), "--to", "mlflow", "--into", str(out.parent / name)], 2)
    assert "as in the address of a page" in line
    assert not list(out.parent.rglob("mlflow.db"))


def test_a_tracker_that_cannot_write(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usable("mlflow", monkeypatch, tmp_path)
    export(out, "mlflow", "--where", "seed=0")
    with contextlib.closing(sqlite3.connect(out.parent / "place" / "mlflow.db")) as tables:
        tables.execute("CREATE TRIGGER full BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
        tables.commit()
        (line,) = said(["export", str(out), "--to", "mlflow", "--into", str(out.parent / "place")], 2)
        assert line.startswith("error: --into ") and "disk is full" in line
        tables.execute("DROP TRIGGER full")
        tables.commit()
    export(out, "mlflow")
    check_equal(out, "mlflow")


def test_a_damaged_chunk_ends_an_export_which_goes_on_once_it_is_whole(out: Path, tracker: str) -> None:
    sweep = open_sweep(out)
    pack = sweep["pack"].values[sweep["complete"].values][-1]
    chunk = out / "store.zarr" / pack / "loss" / "c.0.1"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    (line,) = said(["export", str(out), "--to", tracker, "--into", str(out.parent / "place")], 2)
    assert line.startswith(f"error: {chunk}: is damaged")
    chunk.write_bytes(content)
    export(out, tracker)
    check_equal(out, tracker, waits(tracker))


def test_other_tables_of_mlflow_are_written_by_mlflow(
    out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usable("mlflow", monkeypatch, tmp_path)
    monkeypatch.setattr(mlflow_target, "COLUMNS", (*mlflow_target.COLUMNS, "another"))
    export(out, "mlflow")
    check_equal(out, "mlflow")


def test_two_sweeps_share_a_place(out: Path, tracker: str) -> None:
    export(out, tracker)
    other = synthetic.make_trial(seed=7)
    synthetic.write_pack(out.parent / "other", [other], study="a study")
    export(out.parent / "other", tracker)
    export(out, tracker)
    found = READ[tracker](out.parent / "place")
    assert other.id in found and len(found) == 1 + (8 if waits(tracker) else 12)


# --- incidents that no playbook has logged -----------------------------------------------------------------------


def test_incidents_that_are_found_afterwards(tmp_path: Path) -> None:
    trials = [synthetic.make_trial(seed=seed, steps=120) for seed in range(2)]
    loss = 3 + np.exp(-np.arange(120) / 20)
    spike = np.where(np.arange(120) == 80, 9, loss)
    results = tmp_path / "out"
    synthetic.write_pack(results, trials, lambda trial: spike if trial.seed else loss)
    expected = {("incident", int(row.first)) for row in incidents(results).itertuples() if row.trial == trials[1].id}
    assert expected
    export(results, "csv")
    assert not READ["csv"](tmp_path / "place")[trials[1].id].events
    export(results, "csv", "--incidents")
    assert READ["csv"](tmp_path / "place")[trials[1].id].events == expected


# --- names and pages of a stranger -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose every name is one of EVIL, or a formula of a spreadsheet; each in a trial of its own."""
    folder = tmp_path_factory.mktemp("evil")
    names = [*EVIL.values(), "=1+1", "+1", "-1", "@x", "\t=1", "../../up", "a/b", ""]
    trials = [
        synthetic.make_trial(mitigation=name, fault=fault)
        for name in names
        for fault in (synthetic.Fault(), Odd(name=name or "x", start=5))
    ]

    def events(trial: synthetic.Trial) -> list[dict]:
        is_faulty = trial.fault.start == 5
        return [{"site": trial.mitigation, "tensor": trial.mitigation, "step": 5, "changed": True}] if is_faulty else []

    synthetic.write_pack(folder / "out", trials, faults=events, study="<script>alert(1)</script>/../=x\x1b[2J")
    return folder / "out"


def test_names_of_a_stranger(evil: Path, target: str, tmp_path: Path) -> None:
    shutil.copytree(evil, tmp_path / "out")
    export(tmp_path / "out", target)
    found = check_equal(tmp_path / "out", target)
    if target != "netcdf":
        own = {own.tags["mitigation"] for own in found.values()}
        assert all(words.isprintable() for words in own) and len(own) >= 17
    inside = [path for path in tmp_path.rglob("*") if "alert(1)" in path.name or not path.name.isprintable()]
    assert not inside and {path.name for path in tmp_path.iterdir()} == {"out", "place"}


def test_no_cell_is_a_formula(evil: Path, tmp_path: Path) -> None:
    shutil.copytree(evil, tmp_path / "out")
    export(tmp_path / "out", "csv")
    for file in (tmp_path / "place").rglob("*.csv"):
        with open(file, newline="") as content:
            for cell_text in (word for row in csv.reader(content) for word in row):
                assert not cell_text.startswith(("=", "+", "@", "\t", "\r")), cell_text
                assert not cell_text.startswith("-") or float(cell_text) <= 0


@pytest.mark.parametrize("name", EVIL)
def test_keys_texts_and_cells(name: str) -> None:
    for made in (key(name), text(name), cell(name)):
        assert made.isprintable()
    assert len(text(name)) <= 500 and len(key(name)) <= 120 and "/" not in key(name) and ".." not in key("..")
    assert key("optim.lr") == "optim.lr" and cell(-1.5) == -1.5 and cell("-x") == "'-x"


def test_pages_are_handed_on_sealed_and_once(out: Path, tracker: str) -> None:
    (out / "report.html").write_text("<p>report</p>")
    (out / "postmortems").mkdir()
    trial = open_sweep(out)["trial"].values[0]
    (out / "postmortems" / f"{trial}.html").write_text("<p>post-mortem</p>")
    (out / "campaign.html").symlink_to("/etc/passwd")
    (line,) = said(["export", str(out), "--to", tracker, "--into", str(out.parent / "place")], 2)
    assert "campaign.html is a link" in line
    (out / "campaign.html").unlink()
    export(out, tracker)
    pages = [path for path in (out.parent / "place").rglob("*.html") if path.read_bytes().startswith(SEAL)]
    assert sorted(path.read_bytes().removeprefix(SEAL) for path in pages) == [b"<p>post-mortem</p>", b"<p>report</p>"]
    assert "nothing new." in export(out, tracker)[0]
    (out / "report.html").write_text("<p>another</p>")
    assert "nothing new, 1 page." in export(out, tracker)[0]
    assert b"<p>another</p>" in {path.read_bytes().removeprefix(SEAL) for path in pages}
    export(out, tracker, "--signals", "loss")  # all runs are made anew, and have their pages
    kept = {path.read_bytes().removeprefix(SEAL) for path in (out.parent / "place").rglob("*.html")}
    assert kept == {b"<p>another</p>", b"<p>post-mortem</p>"}


def test_a_browser_runs_nothing_of_a_sealed_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.fail("no browser") if is_in_ci() else pytest.skip("needs a browser (make browser)")
    page = b"<html><body id=b>was<script>document.getElementById('b').append('RAN'.toLowerCase())</script><img src=x "
    page += b"onerror=\"document.body.append('RAN'.toLowerCase())\"></body></html>"
    dumped = {}
    for name, content in (("open", page), ("sealed", SEAL + page)):
        (tmp_path / f"{name}.html").write_bytes(content)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
        ]
        command = [browser, *options, (tmp_path / f"{name}.html").as_uri()]
        dumped[name] = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "wasran" in dumped["open"].replace("\n", "") or "ran" in dumped["open"].split("</script>")[1]
    assert "was" in dumped["sealed"] and "ran" not in dumped["sealed"].split("</script>")[1]


# --- no request --------------------------------------------------------------------------------------------------


def test_nothing_asks_a_network(out: Path, tracker: str) -> None:
    """Also none of the processes that a library starts: every server that it would know is one of ours."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        asked = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WANDB_BASE_URL", "HF_ENDPOINT", "MLFLOW_TRACKING_URI")
        names = dict.fromkeys(asked, address) | {name.lower(): address for name in asked[:3]}
        remote = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "TRACKIO_SERVER_URL": address}
        variables = {name: value for name, value in os.environ.items() if name not in ("NO_PROXY", "no_proxy")}
        command = [sys.executable, "-m", "analysis", "export", str(out), "--to", tracker]
        subprocess.run(
            [*command, "--into", str(out.parent / "place")],
            env=variables | names | remote | {"HOME": str(out.parent / "home")},
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        with pytest.raises(BlockingIOError):
            server.accept()
    check_equal(out, tracker, waits(tracker))


# --- tables ------------------------------------------------------------------------------------------------------


def test_the_dataset_comes_back(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usable("netcdf", monkeypatch, tmp_path)
    export(out, "netcdf")
    (file,) = (out.parent / "place").glob("*.nc")
    with xr.open_dataset(file) as found:
        expected = open_sweep(out).load()
        for name in expected.variables:
            np.testing.assert_array_equal(found[name].values, expected[name].values, str(name))
            assert found[name].attrs == expected[name].attrs
        assert found.attrs["study"] == "a study"


def test_numbers_of_csv_have_all_digits(out: Path) -> None:
    export(out, "csv")
    (folder,) = (out.parent / "place").iterdir()
    curves = pd.read_csv(folder / "curves.csv", dtype={"trial": str})
    assert (curves["value"] == curves["value"].astype("float32")).all()
