"""What survives crashes, kills and Ctrl-C: packs that are stopped in the midst of a step."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from harness.storage.checkpoint import Checkpoints
from sweeps.commands.status import status_of
from sweeps.running import launch, local
from sweeps.running.job import ERRORS
from tests.sweeps import command
from tests.sweeps.forks import Forked
from tests.sweeps.traps import STOPPING, TRAPS, goes_on, recorded

INTERRUPTED = r"interrupted; (checkpoints saved up to step \d; )?the same command goes on from here\n"


@pytest.fixture(scope="module")
def unsprung(rigged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of TRAPS that do nothing."""
    folder = tmp_path_factory.mktemp("unsprung")
    ended = command.end(command.fork(*command.tiny(*TRAPS), cwd=folder, path=[rigged]))
    assert (ended.status, ended.err) == (0, "")
    assert "trained 6 of 6 trials" in ended.out
    assert "3 faults never fired, or wrote the value that was there" in ended.out
    return folder / "out"


def check_crash(out: Path, said: str, seed: int) -> None:
    """The pack of this seed has left a trace and is named."""
    (trace,) = (file for file in (out / ERRORS).iterdir() if "has sprung" in file.read_text())
    assert f"pack {trace.stem} failed: RuntimeError: the trap; trace in {trace}\n" in said
    text = trace.read_text()
    assert "Traceback (most recent call last):" in text
    trials = [json.loads(line) for line in text.split("trials of this pack:\n")[1].splitlines()]
    assert sorted((trial["fault"]["kind"], trial["seed"]) for trial in trials) == [("none", seed), ("rigged", seed)]


def test_a_crash(rigged: Path, unsprung: Path, tmp_path: Path) -> None:
    """Its pack leaves a trace and is named; the others finish; the same command tries it again."""
    (tmp_path / "switch").write_text("raise 1")
    crashed = command.end(command.fork(*command.tiny(*TRAPS), cwd=tmp_path, path=[rigged]))
    assert (crashed.status, crashed.err) == (1, "")
    assert "trained 4 of 6 trials" in crashed.out
    assert len(list((tmp_path / "out" / ERRORS).iterdir())) == 1
    check_crash(tmp_path / "out", crashed.out, 1)
    assert "4 complete already: 2 to train in 1 pack" in goes_on(rigged, tmp_path, unsprung)


def test_a_crash_and_a_killed_worker(rigged: Path, unsprung: Path, tmp_path: Path) -> None:
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
    goes_on(rigged, tmp_path, unsprung)


def test_a_killed_sweep(rigged: Path, unsprung: Path, tmp_path: Path) -> None:
    """The only worker is the command itself."""
    (tmp_path / "switch").write_text("kill 1")
    killed = command.end(command.fork(*command.tiny(*TRAPS), cwd=tmp_path, path=[rigged]))
    assert killed.status == -signal.SIGKILL
    assert len(recorded(tmp_path / "out")) == 2
    goes_on(rigged, tmp_path, unsprung)


def trapped(rigged: Path, folder: Path, switch: str, workers: int) -> Forked:
    """A sweep that has reached what the file `switch` has in store for it."""
    (folder / "switch").write_text(switch)
    process = command.fork(*command.tiny(*TRAPS, f"hydra.launcher.workers={workers}"), cwd=folder, path=[rigged])
    command.until((folder / "switch.reached").exists, "the trap is reached")
    return process


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
        (2, alone, signal.SIGTERM, 143),
        (2, alone, signal.SIGKILL, -9),
    ],
    ids=["Ctrl-C, one", "Ctrl-C, two", "SIGTERM to the parent", "SIGKILL to the parent"],
)
def test_a_stopped_sweep(
    rigged: Path,
    unsprung: Path,
    tmp_path: Path,
    workers: int,
    send: Callable[[subprocess.Popen | Forked, int], None],
    number: int,
    status: int,
) -> None:
    """In the midst of a step that does not end: the second signal ends it, and no process stays behind."""
    process = trapped(rigged, tmp_path, "wait 1", workers)
    send(process, number)
    if number != signal.SIGKILL:
        command.until(lambda: process.said == STOPPING, "it says that a second signal ends it at once")
        send(process, number)
    stopped = command.end(process)
    command.until(lambda: command.is_group_gone(process.pid), "all processes of the sweep end")
    assert stopped.status == status
    if number != signal.SIGKILL:
        assert stopped.err == STOPPING
        assert re.search(rf"\n{INTERRUPTED}$", stopped.out)
        trained = re.search(r"trained (\d) of 6 trials", stopped.out)
        assert int(trained[1]) <= len(recorded(tmp_path / "out"))  # a pack may end in the moment of the signal
    if number == signal.SIGINT and workers == 2:  # the others leave what this one, or a killed sweep, leaves
        goes_on(rigged, tmp_path, unsprung)


@pytest.mark.parametrize(
    ("workers", "send", "number", "status"),
    [(1, group, signal.SIGINT, 130), (2, alone, signal.SIGTERM, 143)],
    ids=["Ctrl-C, one", "SIGTERM, two"],
)
def test_a_stopped_sweep_saves_checkpoints(
    rigged: Path,
    unsprung: Path,
    tmp_path: Path,
    workers: int,
    send: Callable[[subprocess.Popen | Forked, int], None],
    number: int,
    status: int,
) -> None:
    """After the step that is under way; the same command goes on there, bit for bit."""
    process = trapped(rigged, tmp_path, "hold 0 hold 1", workers)
    send(process, number)
    command.until(lambda: process.said == STOPPING, "it says that it stops")
    (tmp_path / "switch.go").touch()
    stopped = command.end(process)
    assert (stopped.status, stopped.err) == (status, STOPPING)
    found = status_of(tmp_path / "out")
    assert not found.lost and not found.running and 1 <= len(found.stopped) <= workers
    assert "step 4 of 6, 2 trials" in found.stopped.values(), "the trap is in step 3"
    (step,) = re.findall(r"\ninterrupted; checkpoints saved up to step (\d); the same command goes on", stopped.out)
    several = f"{len(found.stopped)} packs go on from their checkpoints, the farthest at step {step}\n"
    one = f"1 pack goes on from its checkpoint, at step {step}\n"
    assert (one if len(found.stopped) == 1 else several) in goes_on(rigged, tmp_path, unsprung)


def test_ctrl_c_where_a_shell_has_it_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a script does for a command with `&`: the sweep stops all the same, and says so."""
    save, sent = Checkpoints.is_due, list[int]()

    def sending(checkpoints: Checkpoints, step: int) -> bool:
        if step == 3 and not sent:
            sent.append(step)
            signal.raise_signal(signal.SIGINT)
        return save(checkpoints, step)

    monkeypatch.setattr(Checkpoints, "is_due", sending)
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = command.call(*command.tiny("seed=range(2)", "out=out"))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "as it was before"
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.status == 130
    assert ended.out.endswith("interrupted; checkpoints saved up to step 3; the same command goes on from here\n")
    again = command.call(*command.tiny("seed=range(2)", "out=out"))
    assert again.status is None or again.status == 0
    assert "1 pack goes on from its checkpoint, at step 3\n" in again.out and "trained 2 of 2 trials" in again.out


@pytest.mark.parametrize(("is_removed", "workers"), [(False, 2), (True, 1)], ids=["moved", "removed"])
def test_a_folder_that_is_moved_or_removed_meanwhile(
    rigged: Path, unsprung: Path, tmp_path: Path, workers: int, is_removed: bool
) -> None:
    """One line at the next block, nothing in its old place; the same command goes on in the new one."""
    process = trapped(rigged, tmp_path, "hold 1", workers)
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
        goes_on(rigged, tmp_path, unsprung)


def test_stopped_while_workers_start(tmp_path: Path) -> None:
    """They take seconds to import torch, and say nothing if that is cut short."""
    arguments = command.tiny("seed=range(4)", "optim.lr=1e-2,1e-1", "out=out", "hydra.launcher.workers=2")
    process = command.start(*arguments, cwd=tmp_path)
    command.until(lambda: command.is_importing_torch(process.pid), "the workers' parent is in the midst of its imports")
    group(process, signal.SIGINT)
    stopped = command.end(process)
    command.until(lambda: command.is_group_gone(process.pid), "all processes of the sweep end")
    assert (stopped.status, stopped.err) == (130, STOPPING)
    assert stopped.out.endswith("interrupted; the same command goes on from here\n")


def test_a_second_signal_leaves_no_lock_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while results are waited for, which takes locks that the pool's threads need to end."""
    whole: list[object] = []

    def sent_to(*arguments: Any, **others: Any) -> Any:
        if not whole:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        whole.append(wait(*arguments, **others))
        return whole[-1]

    monkeypatch.setattr(local, "wait", sent_to)
    monkeypatch.chdir(tmp_path)
    ended = command.call(*command.tiny("seed=range(4)", "out=out", "pack.size=1", "hydra.launcher.workers=2"))
    assert (ended.status, len(whole)) == (143, 1)
    assert ended.out.endswith("interrupted; the same command goes on from here\n")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert command.call(*command.tiny("seed=range(4)", "out=out", "pack.size=1")).status == 0
    assert len(recorded(tmp_path / "out")) == 4


def test_ctrl_c_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **others: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "make_plan", interrupt)
    monkeypatch.chdir(tmp_path)
    ended = command.call(*command.tiny())
    assert (ended.status, ended.out, ended.err) == (130, "", "interrupted\n")
    assert not any(tmp_path.iterdir())
