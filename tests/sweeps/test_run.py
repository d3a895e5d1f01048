"""Sweeps as a user runs them: what is trained, what is skipped, and what survives crashes, kills and Ctrl-C.

A fault of these tests, `rigged`, stops the process that trains at a chosen step in a chosen way. It is added as any
new fault is: by a file in a copy of the folder of injectors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from analysis.open_sweep import fault_events
from harness.stored import read_packs
from sweeps import launch
from sweeps.job import ERRORS, PROGRESS
from sweeps.status import status_of
from tests.sweeps.forks import Forked

GRID = ("seed=range(4)", "optim.lr=1e-2,1e-1")  # 8 trials, 2 packs
TRAPS = ("seed=range(3)", "fault=rigged", "fault.switch=switch", "pack.size=2", "out=out")  # 3 packs of golden and trap
RIGGED = '''
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from harness.config import PER_TRIAL, anything, number
from harness.sites import Site
from injectors.fault import InjectableFault, Strike


@dataclass(frozen=True)
class Rigged(InjectableFault):
    """Does what the file `switch` says to trials of its seeds, and nothing if there is none."""

    kind: str = "rigged"
    start: int = number(PER_TRIAL, 3, "step of the strike", low=0)
    switch: str = anything(PER_TRIAL, "", "file with words raise, kill or wait, each with a seed")

    def arm(self, context):
        return _Trap(Site.WEIGHT, self.strike_steps(context.trial), False, switch=Path(self.switch), seed=context.seed)


@dataclass
class _Trap(Strike):
    switch: Path = Path()
    seed: int = 0

    def strike(self, visit):
        given = self.switch.read_text().split() if self.switch.exists() else []
        words = [word for word, seed in zip(given[::2], given[1::2]) if int(seed) == self.seed]
        for word in words:
            self.switch.with_suffix(".reached").touch()
            if word == "raise":
                raise RuntimeError("the trap\\nhas sprung")
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while word == "wait" or (word == "hold" and not self.switch.with_suffix(".go").exists()):
                time.sleep(0.01)
        return []
'''


@pytest.fixture(scope="session")
def rigged(command: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `injectors` have one fault more."""
    folder = tmp_path_factory.mktemp("rigged")
    shutil.copytree(
        command.REPOSITORY / "injectors", folder / "injectors", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "injectors" / "rigged.py").write_text(RIGGED)
    return folder


@pytest.fixture(scope="module")
def undisturbed(command: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def recorded(out: Path) -> list[str]:
    """Every trial that a complete pack has, as often as it is there."""
    return sorted(trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"])


def is_spotless(out: Path) -> bool:
    """No trace of an error, no progress file, no temporary file."""
    left = [*(out / PROGRESS).glob("*"), *(out / ERRORS).glob("*"), *(out / "store.zarr").rglob(".*")]
    return not left


# --- grids that grow ---------------------------------------------------------------------------------------------


def test_results_are_there(command: ModuleType, undisturbed: Path) -> None:
    found = command.results(undisturbed)
    assert found.sizes["trial"] == 8
    assert found.complete.all()
    assert np.isfinite(found.loss).all()
    assert is_spotless(undisturbed)


def test_workers_change_no_bit(command: ModuleType, undisturbed: Path, tmp_path: Path) -> None:
    ended = command.end(command.start(*command.tiny(*GRID, "out=out", "hydra.launcher.workers=2"), cwd=tmp_path))
    assert (ended.status, ended.err) == (0, "")
    assert re.search(r"trained 8 of 8 trials: \d", ended.out)
    assert not command.differing(command.results(tmp_path / "out"), command.results(undisturbed))
    assert is_spotless(tmp_path / "out")


def test_again_trains_nothing(command: ModuleType, copied: Path) -> None:
    before = command.tree(copied)
    ended = command.call(*command.tiny(*GRID, f"out={copied}"))
    assert (ended.status, ended.err) == (0, "")
    assert "8 trials asked for, 0 golden twins added, 8 complete already: 0 to train in 0 packs" in ended.out
    assert command.tree(copied) == before


def test_a_wider_grid_trains_what_is_new(command: ModuleType, copied: Path) -> None:
    old = command.tree(copied / "store.zarr")
    ended = command.call(*command.tiny("seed=range(6)", "optim.lr=1e-2,1e-1", f"out={copied}"))
    assert (ended.status, ended.err) == (0, "")
    assert "12 trials asked for, 0 golden twins added, 8 complete already: 4 to train in 1 pack" in ended.out
    now = command.tree(copied / "store.zarr")
    assert {name: now[name] for name in old} == old
    assert len(recorded(copied)) == len(set(recorded(copied))) == 12


def test_a_later_fault_is_compared_with_the_golden_run_that_is_stored(command: ModuleType, copied: Path) -> None:
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


def test_faults_that_never_fired_are_reported(command: ModuleType, tmp_path: Path) -> None:
    """The first trial is past all numbers before the strike; the second is struck."""
    fault = ("fault=weight_bit", "fault.start=5", "fault.tensor=head", "optim.weight_decay=0")
    ended = command.call(*command.tiny("optim.lr=1e30,1e-3", "schedule.warmup=0", *fault, f"out={tmp_path / 'out'}"))
    assert ended.status == 0
    assert "1 fault never fired, or wrote the value that was there" in ended.out
    assert "1 divergent, 3 non-finite" in ended.out  # the first and its twin, and the second by its fault
    assert len(fault_events(tmp_path / "out")) == 1


def test_text_that_changed_is_refused(command: ModuleType, tmp_path: Path) -> None:
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


def test_a_plan_creates_nothing(command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_results_lie_in_a_folder_of_the_study(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.call(*command.tiny("seed=0,1")).status == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["grid"]
    assert {path.name for path in tmp_path.iterdir()} == {"results"}


# --- packs that crash, processes that are killed -----------------------------------------------------------------


@pytest.fixture(scope="module")
def unsprung(command: ModuleType, rigged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of TRAPS that do nothing."""
    folder = tmp_path_factory.mktemp("unsprung")
    ended = command.end(command.fork(*command.tiny(*TRAPS), cwd=folder, path=[rigged]))
    assert (ended.status, ended.err) == (0, "")
    assert "trained 6 of 6 trials" in ended.out
    assert "3 faults never fired, or wrote the value that was there" in ended.out
    return folder / "out"


def goes_on(command: ModuleType, rigged: Path, folder: Path, unsprung: Path) -> str:
    """The same command without the trap finishes, and nothing shows that it was ever disturbed. Returns its output."""
    (folder / "switch").unlink()
    already = len(recorded(folder / "out"))
    again = command.end(command.fork(*command.tiny(*TRAPS), cwd=folder, path=[rigged]))
    assert (again.status, again.err) == (0, "")
    assert f"trained {6 - already} of {6 - already} trials" in again.out
    assert recorded(folder / "out") == recorded(unsprung)
    assert not command.differing(command.results(folder / "out"), command.results(unsprung))
    assert is_spotless(folder / "out")
    return again.out


def check_crash(out: Path, said: str, seed: int) -> None:
    """The pack of this seed has left a trace and is named."""
    (trace,) = (file for file in (out / ERRORS).iterdir() if "has sprung" in file.read_text())
    assert f"pack {trace.stem} failed: RuntimeError: the trap; trace in {trace}\n" in said
    text = trace.read_text()
    assert "Traceback (most recent call last):" in text
    trials = [json.loads(line) for line in text.split("trials of this pack:\n")[1].splitlines()]
    assert sorted((trial["fault"]["kind"], trial["seed"]) for trial in trials) == [("none", seed), ("rigged", seed)]


def test_a_crash(command: ModuleType, rigged: Path, unsprung: Path, tmp_path: Path) -> None:
    """Its pack leaves a trace and is named; the others finish; the same command tries it again."""
    (tmp_path / "switch").write_text("raise 1")
    crashed = command.end(command.fork(*command.tiny(*TRAPS), cwd=tmp_path, path=[rigged]))
    assert (crashed.status, crashed.err) == (1, "")
    assert "trained 4 of 6 trials" in crashed.out
    assert len(list((tmp_path / "out" / ERRORS).iterdir())) == 1
    check_crash(tmp_path / "out", crashed.out, 1)
    assert "4 complete already: 2 to train in 1 pack" in goes_on(command, rigged, tmp_path, unsprung)


def test_a_crash_and_a_killed_worker(command: ModuleType, rigged: Path, unsprung: Path, tmp_path: Path) -> None:
    """Killed as by the system when memory runs out: its pack has failed, as that which crashed; the others finish."""
    (tmp_path / "switch").write_text("kill 1 raise 2")
    arguments = command.tiny(*TRAPS, "hydra.launcher.workers=2")
    ended = command.end(command.fork(*arguments, cwd=tmp_path, path=[rigged]))
    assert (ended.status, ended.err) == (1, "")
    assert "trained 2 of 6 trials" in ended.out
    check_crash(tmp_path / "out", ended.out, 2)
    (trace,) = (file for file in (tmp_path / "out" / ERRORS).iterdir() if "has sprung" not in file.read_text())
    assert f"pack {trace.stem} failed: worker died: " in ended.out
    assert '"seed": 1' in trace.read_text() and '"seed": 2' not in trace.read_text()
    goes_on(command, rigged, tmp_path, unsprung)


def test_a_killed_sweep(command: ModuleType, rigged: Path, unsprung: Path, tmp_path: Path) -> None:
    """The only worker is the command itself."""
    (tmp_path / "switch").write_text("kill 1")
    killed = command.end(command.fork(*command.tiny(*TRAPS), cwd=tmp_path, path=[rigged]))
    assert killed.status == -signal.SIGKILL
    assert len(recorded(tmp_path / "out")) == 2
    goes_on(command, rigged, tmp_path, unsprung)


def group(process: subprocess.Popen | Forked, number: int) -> None:
    """As a terminal does for Ctrl-C: every process of the group gets it."""
    os.killpg(process.pid, number)


def alone(process: subprocess.Popen | Forked, number: int) -> None:
    """As `kill` does."""
    os.kill(process.pid, number)


@pytest.mark.parametrize(
    ("workers", "send", "number", "status"),
    [
        (1, group, signal.SIGINT, 130),
        (2, group, signal.SIGINT, 130),
        (2, alone, signal.SIGINT, 130),
        (2, alone, signal.SIGTERM, 143),
        (2, alone, signal.SIGKILL, -9),
    ],
    ids=["Ctrl-C, one", "Ctrl-C, two", "SIGINT to the parent", "SIGTERM", "SIGKILL to the parent"],
)
def test_a_stopped_sweep(
    command: ModuleType,
    rigged: Path,
    unsprung: Path,
    tmp_path: Path,
    workers: int,
    send: Callable[[subprocess.Popen | Forked, int], None],
    number: int,
    status: int,
) -> None:
    """In the midst of a step that does not end: the second signal ends it, and no process stays behind."""
    (tmp_path / "switch").write_text("wait 1")
    arguments = command.tiny(*TRAPS, f"hydra.launcher.workers={workers}")
    process = command.fork(*arguments, cwd=tmp_path, path=[rigged])
    command.until((tmp_path / "switch.reached").exists, "the trap is reached")
    send(process, number)
    if number != signal.SIGKILL:
        command.until(lambda: process.said == STOPPING, "it says that a second signal ends it at once")
        send(process, number)
    stopped = command.end(process)
    command.until(lambda: command.is_group_gone(process.pid), "all processes of the sweep end")
    assert stopped.status == status
    if number != signal.SIGKILL:
        assert stopped.err == STOPPING
        assert stopped.out.endswith("interrupted; the same command goes on from here\n")
        trained = re.search(r"trained (\d) of 6 trials", stopped.out)
        assert int(trained[1]) <= len(recorded(tmp_path / "out"))  # a pack may end in the moment of the signal
    if number == signal.SIGINT and workers == 2:  # the others leave what this one, or a killed sweep, leaves
        goes_on(command, rigged, tmp_path, unsprung)


@pytest.mark.parametrize(
    ("workers", "send", "number", "status"),
    [(1, group, signal.SIGINT, 130), (2, group, signal.SIGINT, 130), (2, alone, signal.SIGTERM, 143)],
    ids=["Ctrl-C, one", "Ctrl-C, two", "SIGTERM"],
)
def test_a_stopped_sweep_saves_checkpoints(
    command: ModuleType,
    rigged: Path,
    unsprung: Path,
    tmp_path: Path,
    workers: int,
    send: Callable[[subprocess.Popen | Forked, int], None],
    number: int,
    status: int,
) -> None:
    """After the step that is under way; the same command goes on there, bit for bit."""
    (tmp_path / "switch").write_text("hold 0 hold 1")
    process = command.fork(*command.tiny(*TRAPS, f"hydra.launcher.workers={workers}"), cwd=tmp_path, path=[rigged])
    command.until((tmp_path / "switch.reached").exists, "the trap is reached")
    send(process, number)
    command.until(lambda: process.said == STOPPING, "it says that it stops")
    (tmp_path / "switch.go").touch()
    stopped = command.end(process)
    assert (stopped.status, stopped.err) == (status, STOPPING)
    found = status_of(tmp_path / "out")
    assert not found.lost and not found.running and 1 <= len(found.stopped) <= workers
    assert "step 4 of 6, 2 trials" in found.stopped.values(), "the trap is in step 3"
    goes_on(command, rigged, tmp_path, unsprung)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_removed", [False, True], ids=["moved", "removed"])
def test_a_folder_that_is_moved_or_removed_meanwhile(
    command: ModuleType, rigged: Path, unsprung: Path, tmp_path: Path, workers: int, is_removed: bool
) -> None:
    """One line at the next block, nothing in its old place; the same command goes on in the new one."""
    (tmp_path / "switch").write_text("hold 1")
    process = command.fork(*command.tiny(*TRAPS, f"hydra.launcher.workers={workers}"), cwd=tmp_path, path=[rigged])
    command.until((tmp_path / "switch.reached").exists, "the trap is reached")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    if is_removed:  # in one go, while others write into it
        shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "switch.go").touch()
    stopped = command.end(process)
    assert stopped.status == 1 and "Traceback" not in stopped.out
    assert stopped.err == (
        f"error: out={tmp_path / 'out'}: was moved or removed meanwhile; what is left of it can be gone on with by the "
        "same command, with out= where it is now\n"
    )
    assert not (tmp_path / "out").exists()
    if not is_removed:
        (tmp_path / "elsewhere").rename(tmp_path / "out")
        assert status_of(tmp_path / "out").asked >= set(recorded(tmp_path / "out"))
        goes_on(command, rigged, tmp_path, unsprung)


STOPPING = "stopping once checkpoints are saved; again to stop at once\n"


@pytest.mark.parametrize(
    ("send", "number", "status"), [(group, signal.SIGINT, 130), (alone, signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_stopped_while_workers_start(
    command: ModuleType,
    tmp_path: Path,
    send: Callable[[subprocess.Popen | Forked, int], None],
    number: int,
    status: int,
) -> None:
    """They take seconds to import torch, and say nothing if that is cut short."""
    process = command.start(*command.tiny(*GRID, "out=out", "hydra.launcher.workers=2"), cwd=tmp_path)
    command.until(lambda: command.is_importing_torch(process.pid), "the workers' parent is in the midst of its imports")
    send(process, number)
    stopped = command.end(process)
    command.until(lambda: command.is_group_gone(process.pid), "all processes of the sweep end")
    assert (stopped.status, stopped.err) == (status, STOPPING)
    assert stopped.out.endswith("interrupted; the same command goes on from here\n")


def test_ctrl_c_before_anything_is_trained(
    command: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "make_plan", interrupt)
    monkeypatch.chdir(tmp_path)
    ended = command.call(*command.tiny())
    assert (ended.status, ended.out, ended.err) == (130, "", "interrupted\n")
    assert not any(tmp_path.iterdir())
