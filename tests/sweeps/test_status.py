"""What `status` says of a sweep: done, running, failed and lost, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.storage.pack_info import NOT_RECORDED
from harness.storage.progress_files import ERRORS, PROGRESS
from harness.storage.stored import read_packs
from sweeps.commands.status import status_of
from sweeps.running import job
from sweeps.running.ledger import LOCKS
from tests.harness.recording import Emulated
from tests.sealing import seal_again
from tests.sweeps import command


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of eight trials in two packs."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert command.call(*command.tiny("seed=range(4)", "optim.lr=1e-3,1e-2", f"out={out}")).status == 0
    return out


@pytest.fixture
def done(finished: Path, empty: Path) -> Path:
    """A copy of that sweep."""
    return Path(shutil.copytree(finished, empty / "out"))


def test_a_finished_sweep(done: Path) -> None:
    ended = command.call("status", "out")
    assert (ended.status, ended.err) == (None, "")
    assert ended.out.splitlines() == [
        "out: 8 of 8 trials done",
        "running: 0 packs",
        "queued: 0 packs",
        "stopped: 0 packs",
        "failed: 0 packs",
        "lost: 0 packs",
    ]


def test_what_runs_has_failed_and_was_lost(done: Path) -> None:
    (done / PROGRESS).mkdir(exist_ok=True)
    for pack in ("aaa", "bbb", "ccc"):
        values = {"begun": 0, "steps": 3, "of": 6, "trials": 4, "frozen": 0}
        (done / PROGRESS / f"{pack}.json").write_text(json.dumps(values))
    (done / PROGRESS / "torn.json").write_text("{")
    (done / ERRORS).mkdir()
    trace = "RuntimeError: no\n\nTraceback ...\nRuntimeError: no more\n\n\ntrials of this pack:\n{}\n"
    for pack in ("ccc", "ddd"):
        (done / ERRORS / f"{pack}.txt").write_text(trace)
    (done / LOCKS).mkdir(exist_ok=True)
    (done / LOCKS / "bbb.lock").touch()  # of a process that was killed
    with command.held(done / LOCKS / "aaa.lock"):
        found, ended = status_of(done), command.call("status", "out")
        cancelled = command.call("cancel", "out")
    assert found.running == {"aaa": "step 3 of 6, 4 trials"}
    assert found.lost == {"bbb": "step 3 of 6, 4 trials"}
    assert found.failed == {"ccc": "RuntimeError: no more", "ddd": "RuntimeError: no more"}
    assert "  bbb  step 3 of 6, 4 trials" in ended.out.splitlines()
    assert [line for line in ended.out.splitlines() if "left out" in line][0].startswith(
        "left out: out/progress/torn.json: is not JSON"
    )
    assert ended.out.endswith("the same command as before trains what is not done\n")
    assert cancelled.out.splitlines() == [
        "cancelled 0 Slurm jobs; the same command as before goes on from here",
        "1 pack in training by a command on a machine: Ctrl-C there ends it",
    ]


def test_a_pack_that_a_gpu_could_not_replay(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, in the store and in `status`, with the reason, and as it would have been."""
    monkeypatch.setattr(job, "recordings", lambda device: Refusing)
    words = command.tiny("seed=range(2)", "out=out", "hydra.launcher.workers=1")
    with pytest.warns(UserWarning, match="could not be recorded"):
        assert command.call(*words).status == 0
    (pack,) = read_packs(empty / "out")
    says = "{} could not be recorded, and none is replayed: operation not permitted"
    both = "; ".join(says.format(name) for name in ("a step", "a piece of validation"))
    assert pack.attributes["environment"][NOT_RECORDED] == both
    lines = command.call("status", "out").out.splitlines()
    assert lines[-2:] == ["slower than they could be: 1 pack", f"  {pack.id}  {both}"]
    assert command.call("verify", "out").status is None


class Refusing(Emulated):
    """What CUDA does where something in a step cannot be recorded."""

    def record(self, function: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted\nand more")


WHAT_LOADS = """
import sys
from sweeps.commands.console import run
print([run([name, "out"]) for name in ("status", "cancel", "verify")], "torch" in sys.modules, file=sys.stderr)
"""


def test_commands_that_train_nothing_load_no_torch(done: Path) -> None:
    """Loading it takes longer than all else that they do."""
    ended = subprocess.run([sys.executable, "-c", WHAT_LOADS], cwd=done.parent, capture_output=True, text=True)
    assert ended.stderr.splitlines() == ["[0, 0, 0] False"]


def test_what_is_printed_is_printable(done: Path) -> None:
    """Names of files, traces and the study are whatever somebody wrote there."""
    name = "a\x1b]0;x\x07\n\u202e" + "b" * 100
    good = {"begun": 0, "steps": 3, "of": 6, "trials": 4, "frozen": 0}
    for folder in (PROGRESS, ERRORS):
        (done / folder).mkdir(exist_ok=True)
    (done / PROGRESS / f"{name}.json").write_text(json.dumps(good))
    (done / PROGRESS / "torn\x9b31m\udcff.json").write_text("\x1b[2J")
    (done / ERRORS / f"{name}c.txt").write_text("\x1b[31mred\x1b[0m \u200b\r" + "y" * 10_000)
    renamed = done.rename(done.with_name("o\x1bt"))
    (done.parent / "link").symlink_to(renamed)  # a name that the command line takes
    root = renamed / "store.zarr" / "zarr.json"
    seal_again(root, root.read_text().replace('"study":"grid"', '"study":"g\\u001b[2J\\ud800"'))
    for ended in (command.call("status", str(renamed)), command.call(*command.tiny("seed=0", "out=link"))):
        lines = (ended.out + ended.err).splitlines()
        assert lines and all(line.isprintable() and len(line) < 500 for line in lines), ended
    assert r"g\x1b[2J\ud800" in ended.err and ended.status == 2


def test_a_sweep_that_was_cut_short(done: Path) -> None:
    """What was asked for last counts, whatever is there."""
    (done / "plan.json").write_text(json.dumps({"trials": ["new", *status_of(done).asked]}))
    assert command.call("status", "out").out.splitlines()[0] == "out: 8 of 9 trials done"


def test_one_folder_is_named(empty: Path) -> None:
    (line,) = command.refused(empty, "status", "a", "b")
    assert line == "error: status a b: allowed: status and the folder of one sweep"


def test_the_next_command_removes_a_trace_that_a_killed_one_was_writing(done: Path) -> None:
    stray = done / "errors" / f".{'a' * 16}.txt.{'0' * 32}"
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("half a tra")
    assert command.call(*command.tiny("seed=range(4)", "optim.lr=1e-3,1e-2", "out=out")).status == 0
    assert not stray.exists()
