"""Sweeps that grow: what is trained, and what is skipped."""

from __future__ import annotations

import pickle
import re
import shutil
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.reading.open_sweep import fault_events
from tests.sweeps import command
from tests.sweeps.traps import is_spotless, recorded

GRID = ("seed=range(4)", "optim.lr=1e-2,1e-1")  # 8 trials, 2 packs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of GRID, by one worker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = command.call(*command.tiny(*GRID, f"out={folder}/out"))
    assert (ended.status, ended.err) == (0, "")
    assert "8 trials asked for, 0 golden twins added, 0 complete already: 8 to train in 2 packs" in ended.out
    return folder / "out"


@pytest.fixture
def copied(undisturbed: Path, tmp_path: Path) -> Path:
    """Results of GRID to go on with."""
    return Path(shutil.copytree(undisturbed, tmp_path / "out"))


def test_threads_change_no_bit(undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    set_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (asked.append(count), set_threads(count))[1])
    ended = command.call(*command.tiny(*GRID, f"out={tmp_path}/out", "cpu.threads=3"))
    assert ended.status == 0 and 3 in asked
    assert np.array_equal(command.results(tmp_path / "out").loss.values, command.results(undisturbed).loss.values)
    assert command.refused(tmp_path, *command.tiny("out=out", "cpu.threads=0")) == [
        "error: cpu.threads=0: out of range; allowed: >= 1 and <= 4096 or null"
    ]


def test_results_are_there(undisturbed: Path) -> None:
    found = command.results(undisturbed)
    assert found.sizes["trial"] == 8
    assert found.complete.all()
    assert np.isfinite(found.loss).all()
    assert is_spotless(undisturbed)


def test_workers_change_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    ended = command.end(command.fork(*command.tiny(*GRID, "out=out", "hydra.launcher.workers=2"), cwd=tmp_path))
    assert (ended.status, ended.err) == (0, "")
    assert re.search(r"trained 8 of 8 trials: \d", ended.out)
    assert not command.differing(command.results(tmp_path / "out"), command.results(undisturbed))
    assert is_spotless(tmp_path / "out")


def test_again_trains_nothing(copied: Path) -> None:
    before = command.tree(copied)
    ended = command.call(*command.tiny(*GRID, f"out={copied}"))
    assert (ended.status, ended.err) == (0, "")
    assert "8 trials asked for, 0 golden twins added, 8 complete already: 0 to train in 0 packs" in ended.out
    assert command.tree(copied) == before


def test_a_wider_grid_trains_what_is_new(copied: Path) -> None:
    old = command.tree(copied / "store.zarr")
    ended = command.call(*command.tiny("seed=range(6)", "optim.lr=1e-2,1e-1", f"out={copied}"))
    assert (ended.status, ended.err) == (0, "")
    assert "12 trials asked for, 0 golden twins added, 8 complete already: 4 to train in 1 pack" in ended.out
    now = command.tree(copied / "store.zarr")
    assert {name: now[name] for name in old} == old
    assert len(recorded(copied)) == len(set(recorded(copied))) == 12


def test_a_later_fault_is_compared_with_the_golden_run_that_is_stored(copied: Path) -> None:
    fault = ("fault=weight_bit", "fault.start=3", "fault.bit=30", "fault.tensor=head", "fault.element=5")
    ended = command.call(*command.tiny(*GRID, *fault, f"out={copied}"))
    assert (ended.status, ended.err) == (0, "")
    assert "8 trials asked for, 8 golden twins added, 8 complete already: 8 to train in 4 packs" in ended.out
    assert len(recorded(copied)) == len(set(recorded(copied))) == 16
    found = command.results(copied)
    for trial in found.trial.values[found.golden.values != found.trial.values]:
        faulty = found.sel(trial=trial)
        golden = found.sel(trial=str(faulty.golden.values))
        assert faulty.loss.values[:3].tobytes() == golden.loss.values[:3].tobytes()
        assert faulty.loss.values[3] != golden.loss.values[3]


def test_faults_that_never_fired_are_reported(tmp_path: Path) -> None:
    """The first trial is past all numbers before the strike; the second is struck."""
    fault = ("fault=weight_bit", "fault.start=5", "fault.tensor=head", "optim.weight_decay=0")
    ended = command.call(*command.tiny("optim.lr=1e30,1e-3", "schedule.warmup=0", *fault, f"out={tmp_path / 'out'}"))
    assert ended.status == 0
    assert "1 fault never fired, or wrote the value that was there" in ended.out
    assert "1 never learned, 3 non-finite" in ended.out  # the first and its twin, and the second by its fault
    assert len(fault_events(tmp_path / "out")) == 1


def test_text_that_changed_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one thing after another " * 100)
    arguments = ("data.source=text", "data.vocabulary=256", f"data.path={text}", f"out={tmp_path / 'out'}")
    assert command.call(*command.tiny("seed=0,1", *arguments)).status == 0
    text.write_text("one damned thing after another " * 100)
    before = command.tree(tmp_path)
    ended = command.call(*command.tiny("seed=2,3", *arguments))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"error: out={tmp_path / 'out'}: its results come from another text")
    assert ended.err.endswith("allowed: a new folder\n")
    assert command.tree(tmp_path) == before


def test_a_plan_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command.call(*command.tiny(*GRID, "model.width=16,32", "plan=true"))
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith(
        "16 trials asked for, 0 golden twins added, 0 complete already: 16 to train in 4 packs\n"
    )
    rows = [line.split() for line in ended.out.splitlines()[-3:-1]]
    sizes = ["1", "2", "x", "16", "6", "8", "2"]  # depth, batch x tokens, steps, trials, packs
    assert [row[:8] for row in rows] == [["16", *sizes], ["32", *sizes]]
    assert "with 1 worker on cpu" in ended.out
    assert not any(tmp_path.iterdir())


def test_results_lie_in_a_folder_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.call(*command.tiny("seed=0,1")).status == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["grid"]
    assert {path.name for path in tmp_path.iterdir()} == {"results"}


@pytest.mark.parametrize(("place", "name"), [("sweeps.compose.settings", "Run"), ("harness.config.trial", "Objective")])
def test_jobs_of_an_earlier_version_can_be_read(place: str, name: str) -> None:
    """Those that wait in Slurm's queue are pickles, which name classes as they were called."""
    found = pickle.loads(f"c{place}\n{name}\n.".encode())
    assert is_dataclass(found) and found.__name__.startswith(name)
