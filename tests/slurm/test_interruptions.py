"""What a cluster does to a sweep: followed at most by the same command, it ends in the same store, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.test_slurm import LAUNCH, SMALL, arrays, assert_equal_stores, command, eventually, slurm, sweep

pytestmark = pytest.mark.slurm

CLUSTER = Path(__file__).parent / "cluster.sh"
# Two packs, with enough steps after the first checkpoint to be held there.
GRID = ["model.width=16,32", "train.steps=400", "fault=none,weight_bit", "fault.start=200", "checkpoint.every=50"]
LINE = [*GRID, *SMALL[:-1], "train.validate_every=400", *LAUNCH]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    local = [text for text in LINE if "launcher" not in text]
    done = sweep(out, *local)
    assert done.status == 0, done.err
    return out


@contextlib.contextmanager
def begun(process: subprocess.Popen[str], out: Path) -> Iterator[str]:
    """The array of a sweep that goes on. Its two jobs stand still, each from its first checkpoint, in the block."""
    held: dict[str, int] = {}

    def are_held() -> bool:
        assert process.poll() is None, process.communicate()[0]
        for folder in {file.parent for file in out.glob("checkpoints/*/*.json")} - held.keys():
            note = json.loads((out / "slurm" / "packs" / f"{folder.name}.json").read_text())
            for pid in training(note["job"]):
                os.kill(pid, signal.SIGSTOP)
                held[folder] = pid
        return len(held) == 2

    try:
        eventually(are_held)
        (array,) = arrays(out)
        yield array
    finally:
        for pid in held.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def started(out: Path, *line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(out, *(line or LINE)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends_well(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed
    return printed


def states(job: str) -> list[str]:
    """What sacct says of every run of a job, those before a requeue too."""
    return slurm("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job).split("\n")[:-1]


def test_the_time_limit(tmp_path: Path, whole: Path) -> None:
    """Jobs that need more than their minute are warned by Slurm itself, and go back into the queue by themselves.

    Slurm looks at limits every 30 s, and warns at the last look that is early enough: with warning=15 after 15 to 45 s.
    """
    minute = ["hydra.launcher.time=1" if text.startswith("hydra.launcher.time") else text for text in LINE]
    process = started(tmp_path, *minute, "hydra.launcher.warning=15")
    with begun(process, tmp_path) as array:
        tasks = [f"{array}_{number}" for number in range(2)]
        eventually(lambda: all(is_warned(pid) for task in tasks for pid in training(task)))
    ends_well(process)
    assert_equal_stores(tmp_path, whole)
    for task in tasks:
        eventually(lambda task=task: states(task)[-1] == "COMPLETED")
        assert set(states(task)) == {"REQUEUED", "COMPLETED"}
        (log,) = tmp_path.glob(f"slurm/*/{task}_*log.out")
        assert log.read_text().count("Calling checkpoint method") == states(task).count("REQUEUED")


def is_warned(pid: int) -> bool:
    """Whether Slurm's warning has come, for a process that stands still."""
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return bool(int(pending, 16) >> (signal.SIGUSR2 - 1) & 1)


@pytest.mark.parametrize(
    "words",
    [["scontrol", "requeue"], ["scancel", "--signal=USR2"]],
    ids=["requeued by hand", "the signal that comes before the time limit"],
)
def test_a_job_that_goes_back_into_the_queue(tmp_path: Path, whole: Path, words: list[str]) -> None:
    process = started(tmp_path)
    with begun(process, tmp_path) as array:
        slurm(*words, f"{array}_0")
    ends_well(process)
    assert_equal_stores(tmp_path, whole)
    assert eventually(lambda: "REQUEUED" in states(f"{array}_0") and "COMPLETED" in states(f"{array}_0"))
    (log,) = tmp_path.glob(f"slurm/*/{array}_0_*log.out")
    assert ("Caught signal SIGUSR2" in log.read_text()) == ("--signal=USR2" in words)


def test_a_cancelled_task(tmp_path: Path, whole: Path) -> None:
    process = started(tmp_path)
    with begun(process, tmp_path) as array:
        slurm("scancel", f"{array}_1")
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1 and f"Slurm job {array}_1 ended (CANCELLED" in printed, printed
    ends_well(started(tmp_path))
    assert_equal_stores(tmp_path, whole)
    assert eventually(lambda: any(state.startswith("CANCELLED") for state in states(f"{array}_1")))


def test_the_submitting_process_is_killed(tmp_path: Path, whole: Path) -> None:
    process = started(tmp_path)
    with begun(process, tmp_path):
        process.kill()
        process.communicate()
    ends_well(started(tmp_path))
    assert len(arrays(tmp_path)) == 1, "its jobs went on without it"
    assert_equal_stores(tmp_path, whole)


@pytest.fixture
def mended() -> Iterator[None]:
    """The cluster is whole again afterwards."""
    yield
    subprocess.run(["bash", CLUSTER, "up"], check=True, stdout=subprocess.DEVNULL)


def test_a_node_is_lost(tmp_path: Path, whole: Path, mended: None) -> None:
    """Its slurmd and all that ran on it end at once; Slurm gives the job to the other node."""
    process = started(tmp_path)
    with begun(process, tmp_path) as array:
        (task,) = slurm("squeue", "-h", "-r", "-j", array, "-w", "n1", "-o", "%i").split()
        os.kill(int(Path("/run/slurm/slurmd-n1.pid").read_text()), signal.SIGKILL)
        for pid in processes_of(task):
            os.kill(pid, signal.SIGKILL)
        slurm("scontrol", "update", "nodename=n1", "state=down", "reason=test")
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
