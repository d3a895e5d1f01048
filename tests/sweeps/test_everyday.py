"""`remove`, `merge`, `retry` and `demo`: nothing is lost by them, whenever they are killed."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import analysis
from harness.storage.kept_rows import write_rows
from harness.storage.progress_files import read_asked
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import STORE, complete_trials, read_packs, read_signal
from sweeps.commands import console as commands
from tests.sweeps import command

ROOT = Path(__file__).parents[2]
GRID = ("optim.lr=1e-3,1e-2", "mitigation=none,qk_norm", "fault=none,weight_bit", "fault.start=2")
CLOCKS = {"tokens_per_second", "step_seconds"}
# Ends itself, as by kill -9, at its Nth change of a file in a results folder.
KILLED = """
import os, signal, sys
from harness.storage import results_folder as rf, store
from sweeps.commands.console import run
left = [int(sys.argv[1])]
def counted(real):
    def call(*args, **named):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)
    return call
rf.write_at = store.write_at = counted(rf.write_at)
for name in ("rename", "unlink", "remove_tree", "descriptor"):
    setattr(rf.ResultsPath, name, counted(getattr(rf.ResultsPath, name)))
status = run(sys.argv[2:])
print("changes", int(sys.argv[1]) - left[0])
sys.exit(status)
"""


def trained(out: Path, *words: str) -> Path:
    ended = command.call(*command.tiny(f"out={out}", *words))
    assert ended.status == 0, ended.err
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of a grid, and their weights."""
    return trained(tmp_path_factory.mktemp("whole") / "out", *GRID, "seed=0,1", "keep=weights")


def copied(whole: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-r", str(whole), str(tmp_path / "out")], check=True)
    return tmp_path / "out"


def same(one: xr.Dataset, other: xr.Dataset) -> None:
    """Bit for bit, but for the clocks and the order of trials."""
    one, other = (x.sortby("trial").drop_vars(CLOCKS & set(x.data_vars)) for x in (one, other))
    assert set(one.variables) - {"pack"} == set(other.variables) - {"pack"}
    for name in set(one.variables) - {"pack"}:
        if one[name].dtype.kind in "fiub":
            np.testing.assert_array_equal(one[name].values, other[name].values, err_msg=str(name))
        else:
            assert one[name].values.tolist() == other[name].values.tolist(), name


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = commands.run(list(words))
    said = capsys.readouterr()
    return status, said.out, said.err


# --- remove ------------------------------------------------------------------------------------------------------


def test_what_is_removed_is_gone_and_the_rest_is_as_it_was(whole: Path, tmp_path: Path, capsys) -> None:
    out = copied(whole, tmp_path)
    before = analysis.open_sweep(whole)
    status, said, _ = call(capsys, "remove", str(out), "--where", "seed=1", "--yes")
    assert status == 0 and f"removed 8 trials; 8 left in {out}" in said
    same(analysis.open_sweep(out), before.isel(trial=np.flatnonzero(before.seed == 0)))
    assert call(capsys, "verify", str(out))[0] == 0
    left = set(analysis.open_sweep(out).trial.values)
    assert {file.stem for file in (out / "weights").iterdir()} == left == set(read_asked(out).trials)
    assert "8 of 8" in call(capsys, "status", str(out))[1]
    # Trained again, the removed ones are what they were.
    trained(out, *GRID, "seed=0,1", "keep=weights")
    same(analysis.open_sweep(out), before)


def test_a_golden_twin_stays_as_long_as_somebody_has_it(whole: Path, tmp_path: Path, capsys) -> None:
    out = copied(whole, tmp_path)
    status, said, _ = call(capsys, "remove", str(out), "--where", "fault=none", "--yes")
    assert status == 0 and "8 golden twins of trials that stay will stay, too\nnothing to remove" in said
    assert call(capsys, "remove", str(out), "--where", "mitigation=qk_norm", "--yes")[0] == 0
    assert set(analysis.open_sweep(out).mitigation.values) == {"none"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "error: --where: none given; allowed: "),
        (("--where", "seed=7"), "error: --where seed=7: no trial has it; allowed: 0, 1"),
        (("--where", "seed=1"), "error: --yes: not given, and nobody can be asked; allowed: --yes"),
    ],
)
def test_a_wrong_removal_changes_nothing(whole: Path, capsys, monkeypatch, words: tuple[str, ...], said: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = complete_trials(whole)
    status, _, shown = call(capsys, "remove", str(whole), *words)
    assert status == 2 and shown.startswith(said) and complete_trials(whole) == before


def test_whoever_says_no_keeps_all(whole: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n" if "remove 8 of 16 trials" in question else "y")
    assert call(capsys, "remove", str(whole), "--where", "seed=1")[0] == 1
    assert len(complete_trials(whole)) == 16


def test_what_is_being_trained_is_not_removed(whole: Path, tmp_path: Path, capsys) -> None:
    out = copied(whole, tmp_path)
    from sweeps.running.ledger import lock_of
    from sweeps.running.locks import owned

    pack = next(iter(read_packs(out)))
    with owned(lock_of(ResultsPath.open(out), pack.id)):
        code = "import sys; from sweeps.commands.console import run; sys.exit(run(sys.argv[1:]))"
        words = [sys.executable, "-c", code, "remove", str(out), "--where", "seed=1", "--yes"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "is trained or changed at this moment" in done.stderr


# --- merge -------------------------------------------------------------------------------------------------------


def test_two_folders_merged_are_that_of_one_command(whole: Path, tmp_path: Path, capsys) -> None:
    """Bit for bit; also where they overlap, and from an export of the one to that of the other."""
    first = trained(tmp_path / "a", *GRID, "seed=0", "keep=weights")
    second = trained(tmp_path / "b", "optim.lr=1e-2", *GRID[1:], "seed=0,1", "keep=weights")
    third = trained(tmp_path / "c", "optim.lr=1e-3", *GRID[1:], "seed=1", "keep=weights")
    into = tmp_path / "into"
    status, said, err = call(capsys, "merge", str(first), str(second), str(third), "--into", str(into))
    assert status == 0, err
    assert f"16 trials of 3 folders in {into}; 4 trials in several, the same bit for bit" in said
    same(analysis.open_sweep(into), analysis.open_sweep(whole))
    assert call(capsys, "verify", str(into))[0] == 0
    kept = {file.name: file.read_bytes() for file in (whole / "weights").glob("*.safetensors")}
    assert {file.name: file.read_bytes() for file in (into / "weights").glob("*.safetensors")} == kept
    assert "16 of 16" in call(capsys, "status", str(into))[1]
    again = call(capsys, "merge", str(first), str(second), str(third), "--into", str(into))
    assert again[0] == 0 and len(list(read_packs(into))) == sum(
        len(list(read_packs(x))) for x in (first, second, third)
    )


def test_folders_that_do_not_agree_are_not_merged(whole: Path, tmp_path: Path, capsys) -> None:
    out = copied(whole, tmp_path)
    pack = next(iter(read_packs(out)))
    file = out / STORE / pack.id / "zarr.json"
    from harness.storage.json_seal import SEAL, UNSEALED, sealed

    group = json.loads(file.read_text())
    group["attributes"]["outcome"][0] = "divergent"
    group["attributes"][SEAL] = UNSEALED
    file.write_bytes(sealed(json.dumps(group, separators=(",", ":"), allow_nan=False)))
    status, _, said = call(capsys, "merge", str(whole), str(out), "--into", str(tmp_path / "into"))
    assert status == 2 and f"is another one in {whole} and in {out} (outcome); allowed: " in said
    assert not (tmp_path / "into").exists()


def test_a_number_that_differs_is_found(whole: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """In a pack of other rows, whose files are all as they were written."""
    out = copied(whole, tmp_path)
    pack = next(iter(read_packs(out)))

    def changed(of: Any, name: str, first: int, stop: int) -> np.ndarray:
        values = read_signal(of, name, first, stop)
        if name == "grad_norm":
            values[1, 0] = np.nextafter(values[1, 0], np.inf)  # the last bit
        return values

    monkeypatch.setattr("harness.storage.kept_rows.read_signal", changed)
    write_rows(pack, range(1, len(pack.attributes["ids"])), "0" * 16)
    subprocess.run(["rm", "-r", str(pack.path)], check=True)
    status, _, said = call(capsys, "merge", str(whole), str(out), "--into", str(tmp_path / "into"))
    trial = pack.attributes["ids"][1]
    assert status == 2 and f"trial {trial} is another one in {whole} and in {out} (grad_norm); allowed: " in said
    assert said.count("is another one") == 1


def test_what_the_folder_has_stays_as_it_is(whole: Path, tmp_path: Path, capsys) -> None:
    """The same packs, trained by another command at another time: nothing is written over."""
    into = trained(tmp_path / "into", *GRID, "seed=0,1", "keep=weights")
    trained(into, *GRID, "seed=2")
    before = {file: file.read_bytes() for file in (into / STORE).rglob("*") if file.is_file()}
    status, said, err = call(capsys, "merge", str(whole), "--into", str(into))
    assert status == 0, err
    assert f"16 trials of 1 folder in {into}; 16 trials in several, the same bit for bit" in said
    assert {file: file.read_bytes() for file in (into / STORE).rglob("*") if file.is_file()} == before
    assert "24 of 24" in call(capsys, "status", str(into))[1], "what was asked for there still is"
    assert "seed=2" in (read_asked(into).words or ()), "and retry knows how it was trained"


def test_a_store_of_another_format_is_not_merged(whole: Path, tmp_path: Path, capsys) -> None:
    """Which is read with its own numbers, and would lose its format."""
    out = copied(whole, tmp_path)
    file = out / STORE / "zarr.json"
    group = json.loads(file.read_text())
    group["attributes"] = {"format": 5, "study": group["attributes"]["study"]}
    file.write_text(json.dumps(group))
    status, _, said = call(capsys, "merge", str(whole), str(out), "--into", str(tmp_path / "into"))
    assert status == 2 and f"out={out}: holds a store of format 5" in said and "allowed: format 6 or 7" in said
    assert not (tmp_path / "into").exists()


def test_damaged_folders_and_other_studies_are_not_merged(whole: Path, tmp_path: Path, capsys) -> None:
    out = copied(whole, tmp_path)
    chunk = next((out / STORE).glob("*/loss/c.*"))
    content = bytearray(chunk.read_bytes())
    content[3] ^= 1
    chunk.write_bytes(bytes(content))
    status, _, said = call(capsys, "merge", str(whole), str(out), "--into", str(tmp_path / "into"))
    assert status == 2 and str(chunk) in said and not (tmp_path / "into").exists()
    command.write_yaml(tmp_path, "study/mine.yaml", "optim: {lr: 1e-2}\n")
    other = trained(tmp_path / "other", f"--config-dir={tmp_path}", "study=mine", "fault=none")
    status, _, said = call(capsys, "merge", str(whole), str(other), "--into", str(tmp_path / "into"))
    assert status == 2 and "their studies differ" in said
    status, _, said = call(capsys, "merge", str(whole), str(other), "--into", str(whole))
    assert status == 2 and "is one of the folders that are merged" in said


# --- killed ------------------------------------------------------------------------------------------------------


def killed_at(change: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", KILLED, str(change), *words], capture_output=True, text=True, cwd=ROOT)


def changes(*words: str) -> int:
    """How many changes of files a command makes."""
    done = killed_at(10**6, *words)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_removal_that_is_killed_loses_nothing_else(whole: Path, tmp_path: Path, capsys) -> None:
    before = analysis.open_sweep(whole)
    stay = before.isel(trial=np.flatnonzero(before.seed == 0))
    (tmp_path / "all").mkdir()
    number = changes("remove", str(copied(whole, tmp_path / "all")), "--where", "seed=1", "--yes")
    assert number > 50
    for place, change in enumerate(np.linspace(1, number - 1, 4).astype(int)):
        (tmp_path / str(place)).mkdir()
        out = copied(whole, tmp_path / str(place))
        words = ("remove", str(out), "--where", "seed=1", "--yes")
        assert killed_at(change, *words).returncode == -signal.SIGKILL
        sweep = analysis.open_sweep(out)
        left = set(sweep.trial.values)
        assert set(stay.trial.values) <= left <= set(before.trial.values)
        same(sweep, before.sel(trial=sweep.trial.values))
        if left - set(stay.trial.values):
            assert call(capsys, *words)[0] == 0
        same(analysis.open_sweep(out), stay)


def test_a_merge_that_is_killed_goes_on(whole: Path, tmp_path: Path, capsys) -> None:
    before = analysis.open_sweep(whole)
    other = trained(tmp_path / "b", *GRID, "seed=2")
    number = changes("merge", str(whole), str(other), "--into", str(tmp_path / "all"))
    expected = analysis.open_sweep(tmp_path / "all")
    assert number > 50 and expected.sizes["trial"] == 24
    for place, change in enumerate(np.linspace(3, number - 1, 4).astype(int)):
        words = ("merge", str(whole), str(other), "--into", str(tmp_path / str(place)))
        assert killed_at(change, *words).returncode == -signal.SIGKILL
        assert call(capsys, *words)[0] == 0
        same(analysis.open_sweep(tmp_path / str(place)), expected)
        assert call(capsys, "verify", str(tmp_path / str(place)))[0] == 0
    same(analysis.open_sweep(whole), before)


# --- retry, demo -------------------------------------------------------------------------------------------------


def test_what_has_failed_is_trained_by_the_same_words(tmp_path: Path, monkeypatch, capsys) -> None:
    command.write_yaml(tmp_path, "study/mine.yaml", "optim: {lr: 1e-2}\n")
    monkeypatch.chdir(tmp_path)
    out = trained(Path("o"), "--config-dir=.", "study=mine", "seed=0,1", "fault=none")
    pack = next(iter(read_packs(out)))
    subprocess.run(["rm", "-r", str(out / STORE / pack.id)], check=True)
    (out / "errors").mkdir(exist_ok=True)
    (out / "errors" / f"{pack.id}.txt").write_text("RuntimeError: once\n")
    monkeypatch.chdir("/")
    status, said, err = call(capsys, "retry", str(tmp_path / "o"))
    assert status == 0, err
    assert "2 to train" in said and len(complete_trials(tmp_path / "o")) == 2
    assert not list((tmp_path / "o" / "errors").glob("*.txt"))
    assert "0 to train" in call(capsys, "retry", str(tmp_path / "o"))[1]
    status, _, said = call(capsys, "retry", str(tmp_path / "o"), "optim.lrr=1")
    assert status == 2 and "optim.lrr" in said


def test_a_folder_that_does_not_say_how_it_was_trained(whole: Path, tmp_path: Path, capsys) -> None:
    out = copied(whole, tmp_path)
    (out / "plan.json").unlink()
    status, _, said = call(capsys, "retry", str(out))
    assert status == 2 and "does not say by which command it was trained" in said


def test_the_demo_trains_the_quickstart_and_reports(tmp_path: Path, monkeypatch) -> None:
    called = []
    monkeypatch.setattr("sweeps.commands.console._sweep", lambda words: called.append(words))
    monkeypatch.setattr("sweeps.commands.console._analysis", lambda name, words: called.append([name, *words]) or 0)
    assert commands.run(["demo", str(tmp_path / "d")]) == 0
    assert called == [["study=quickstart", f"out={tmp_path / 'd'}"], ["report", str(tmp_path / "d")]]
