"""What a cluster does to a sweep: followed at most by the same command, it ends in the same store, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import LAUNCH, ONE_JOB, SMALL, arrays, assert_equal_stores, eventually, slurm, started, sweep
from tests.sweeps.command import REPOSITORY
from tests.sweeps.forks import Forked

pytestmark = pytest.mark.slurm

CLUSTER = Path(__file__).parent / "cluster.sh"
# Two packs, with enough steps after the first checkpoint to be held there.
GRID = ["model.width=16,32", "train.steps=400", "fault=none,weight_bit", "fault.start=200", "checkpoint.every=50"]
WORK = [*GRID, *SMALL[:-1], "train.validate_every=400"]
TWO_JOBS = [*WORK, *LAUNCH]
LINE = [*WORK, *ONE_JOB]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    done = sweep(out, *WORK)
    assert done.status == 0, done.err
    return out


@contextlib.contextmanager
def begun(process: Forked, out: Path, jobs: int = 1) -> Iterator[str]:
    """The array of a sweep that goes on. Its jobs stand still, each from its first checkpoint, in the block."""
    held: dict[str, int] = {}

    def are_held() -> bool:
        assert process.poll() is None, process.communicate()[0]
        for folder in {file.parent for file in out.glob("checkpoints/*/*.safetensors")} - held.keys():
            note = json.loads((out / "slurm" / "packs" / f"{folder.name}.json").read_text())
            for pid in training(note["job"]):
                os.kill(pid, signal.SIGSTOP)
                held[folder] = pid
        return len(held) == jobs

    try:
        eventually(are_held)
        (array,) = arrays(out)
        yield array
    finally:
        for pid in held.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def ends_well(process: Forked) -> None:
    printed = process.communicate(timeout=900)
    assert process.returncode == 0, printed


def states(job: str) -> list[str]:
    """What sacct says of every run of a job, those before a requeue too."""
    return slurm("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job).split("\n")[:-1]


def test_the_time_limit(tmp_path: Path, whole: Path) -> None:
    """A job whose time is nearly over is warned by Slurm itself, and goes back into the queue by itself.

    Slurm looks at limits every 30 s, and warns at the last look that is early enough. The limit is near while the job
    stands still alone: how long a job takes to start and to end is no matter here.
    """
    process = started(tmp_path, *LINE, "hydra.launcher.warning=15")
    with begun(process, tmp_path) as array:
        task = f"{array}_0"
        limit_to(task, minutes=int(on_queue(task, "%M").rpartition(":")[0]) + 2)
        eventually(lambda: all(is_warned(pid) for pid in training(task)))
        limit_to(task, minutes=60)
    ends_well(process)
    assert_equal_stores(tmp_path, whole)
    eventually(lambda: on_queue(task, "%T") == "COMPLETED")
    eventually(lambda: "REQUEUED" in states(task))
    (log,) = tmp_path.glob(f"slurm/*/{task}_*log.out")
    assert log.read_text().count("Calling checkpoint method") == states(task).count("REQUEUED") == 1


def test_a_warning_after_the_last_pack_is_no_failure() -> None:
    """It may come while Python ends, when no handler of Python's is left: here from the C library's exit."""
    lines = [
        "import ctypes, signal, sys",
        "from sweeps.slurm.on_node import OnNode",
        "OnNode()([])",
        "library = ctypes.CDLL(None)",
        "library.on_exit(library['raise'], None)  # is given the exit status",
        "sys.exit(signal.SIGUSR2)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=REPOSITORY).returncode == signal.SIGUSR2


def limit_to(task: str, minutes: int) -> None:
    slurm("scontrol", "update", f"jobid={task}", f"timelimit={minutes}")


def on_queue(task: str, column: str) -> str:
    """What squeue says of a job, one that has ended too."""
    return slurm("squeue", "--noheader", "--states=all", f"--jobs={task}", f"--format={column}").strip()


def is_warned(pid: int) -> bool:
    """Whether Slurm's warning has come, for a process that stands still."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return bool(int(pending, 16) >> (signal.SIGUSR2 - 1) & 1)


def test_jobs_that_go_back_into_the_queue(tmp_path: Path, whole: Path) -> None:
    """One of them by hand, one by the signal that comes before the time limit."""
    process = started(tmp_path, *TWO_JOBS)
    with begun(process, tmp_path, jobs=2) as array:
        by_hand, by_signal = (f"{array}_{number}" for number in range(2))
        slurm("scontrol", "requeue", by_hand)
        slurm("scancel", "--signal=USR2", by_signal)
    ends_well(process)
    assert_equal_stores(tmp_path, whole)
    for task in (by_hand, by_signal):
        eventually(lambda task=task: {"REQUEUED", "COMPLETED"} <= set(states(task)))
        (log,) = tmp_path.glob(f"slurm/*/{task}_*log.out")
        assert ("Caught signal SIGUSR2" in log.read_text()) == (task == by_signal)


def test_a_cancelled_task(tmp_path: Path, whole: Path) -> None:
    """It is reported, with a trace; the other one ends as ever, and the same command trains what is missing."""
    process = started(tmp_path, *TWO_JOBS)
    with begun(process, tmp_path, jobs=2) as array:
        slurm("scancel", f"{array}_1")
    printed, error = process.communicate(timeout=200)
    assert process.returncode == 1 and f"Slurm job {array}_1 ended (CANCELLED" in printed, printed + error
    (trace,) = (tmp_path / "errors").iterdir()
    assert trace.read_text().startswith(f"Slurm job {array}_1 ended (CANCELLED") and str(trace) in printed
    assert "4 trials asked for, 0 golden twins added, 2 complete already" in sweep(tmp_path, *LINE, "plan=true").out
    again = sweep(tmp_path, *LINE)
    assert again.status == 0, again.out + again.err
    assert_equal_stores(tmp_path, whole)
    assert eventually(lambda: any(state.startswith("CANCELLED") for state in states(f"{array}_1")))


def test_the_submitting_process_is_killed(tmp_path: Path, whole: Path) -> None:
    process = started(tmp_path, *LINE)
    with begun(process, tmp_path):
        process.kill()
        assert process.wait() == -signal.SIGKILL
    again = sweep(tmp_path, *LINE)
    assert again.status == 0, again.out + again.err
    assert len(arrays(tmp_path)) == 1, "its jobs went on without it"
    assert_equal_stores(tmp_path, whole)


def test_a_results_folder_that_is_moved_ends_its_jobs(tmp_path: Path, whole: Path) -> None:
    """With one line each, for the job and for the sweep that waits for it; and it can be gone on with where it is."""
    out, moved = tmp_path / "out", tmp_path / "moved"
    process = started(out, *LINE)
    with begun(process, out) as array:
        out.rename(moved)
    _, error = process.communicate(timeout=200)
    (line,) = error.splitlines()
    assert process.returncode == 1 and line.startswith(f"error: out={out}: was moved or removed meanwhile; ")
    assert eventually(lambda: states(f"{array}_0") == ["FAILED"]), "and does not come back"
    (log,) = moved.glob(f"slurm/*/{array}_0_0_log.out")
    said = [text for text in log.read_text().splitlines() if not text.startswith("submitit INFO ")]
    assert [text for text in said if text.startswith("error: ")] == [line] and "Traceback" not in log.read_text()
    again = sweep(moved, *LINE)
    assert again.status == 0, again.out + again.err
    assert_equal_stores(moved, whole)


@pytest.fixture
def mended() -> Iterator[None]:
    """The cluster is whole again afterwards."""
    yield
    subprocess.run(["bash", CLUSTER, "up"], check=True, stdout=subprocess.DEVNULL)


def test_a_node_is_lost(tmp_path: Path, whole: Path, mended: None) -> None:
    """Its slurmd and all that ran on it end at once; Slurm gives the job to the other node."""
    process = started(tmp_path, *LINE)
    with begun(process, tmp_path) as array:
        task, node = slurm("squeue", "-h", "-r", "-j", array, "-o", "%i %N").split()
        os.kill(int(Path(f"/run/slurm/slurmd-{node}.pid").read_text()), signal.SIGKILL)
        for pid in processes_of(task):
            os.kill(pid, signal.SIGKILL)
        slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    ends_well(process)
    assert_equal_stores(tmp_path, whole)
    assert eventually(lambda: {"NODE_FAIL", "REQUEUED"} & set(states(task)))


def processes_of(task: str) -> list[int]:
    """Everything on this machine that belongs to a job: what has its number in the environment, and its slurmstepds."""
    number = slurm("squeue", "-h", "-j", task, "-o", "%A").strip()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            names = (folder / "cmdline").read_bytes().decode(errors="replace")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"SLURM_JOB_ID={number}".encode() in environment or f"slurmstepd: [{number}." in names:
            found.append(int(folder.name))
    return found


def training(task: str) -> list[int]:
    """The process of a job that trains its packs, which is none of Slurm's."""
    return [pid for pid in processes_of(task) if command_line(pid)[1:4] == ["-u", "-m", "submitit.core._submit"]]


def command_line(pid: int) -> list[str]:
    """Its words; none once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
