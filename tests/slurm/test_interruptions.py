"""What a cluster does to a sweep: followed at most by the same command, it ends in the same store, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import analysis
from tests.slurm.test_slurm import LAUNCH, SMALL, arrays, assert_equal_stores, command, eventually, slurm, sweep

pytestmark = pytest.mark.slurm

CLUSTER = Path(__file__).parent / "cluster.sh"
# Two packs, each of which takes some ten seconds.
GRID = ["model.width=16,32", "train.steps=3000", "fault=none,weight_bit", "fault.start=1500", "checkpoint.every=50"]
LINE = [*GRID, *SMALL[:-1], "train.validate_every=3000", *LAUNCH]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    local = [text for text in LINE if "launcher" not in text]
    done = sweep(out, *local)
    assert done.returncode == 0, done.stderr
    return out


def begun(out: Path) -> str:
    """The array, once both of its jobs have saved a checkpoint."""
    eventually(lambda: len({file.parent for file in out.glob("checkpoints/*/*.json")}) == 2)
    (array,) = arrays(out)
    return array


def started(out: Path, *line: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(out, *(line or LINE)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ends_well(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=900)
    assert process.returncode == 0, printed
    return printed


def states(job: str) -> list[str]:
    """What sacct says of every run of a job, those before a requeue too."""
    return slurm("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job).split("\n")[:-1]


def test_the_time_limit(tmp_path: Path) -> None:
    """A job that needs more than its minute is warned by Slurm itself, and goes back into the queue by itself.

    Slurm looks at limits every 30 s, and warns at the last look that is early enough: with warning=15 after 15 to 45 s.
    """
    fields = ["model.width=16", "fault=none,weight_bit", "fault.start=5", *SMALL[:-1], "train.validate_every=1000"]
    trial_run = sweep(tmp_path / "short", *fields, "train.steps=1000")
    assert trial_run.returncode == 0, trial_run.stderr
    seconds = float(np.nanmedian(analysis.open_sweep(tmp_path / "short").step_seconds))
    line = [*fields, f"train.steps={int(70 / seconds)}"]  # longer than the warning can take, on any machine
    limits = ["hydra/launcher=slurm", "hydra.launcher.time=1", "hydra.launcher.warning=15"]
    process = started(tmp_path / "out", *line, *limits)
    (array,) = eventually(lambda: arrays(tmp_path / "out"))
    eventually(lambda: "REQUEUED" in states(f"{array}_0"))
    slurm("scontrol", "update", f"jobid={array}_0", "timelimit=30")  # once is enough
    local = sweep(tmp_path / "whole", *line)
    assert local.returncode == 0, local.stderr
    ends_well(process)
    assert_equal_stores(tmp_path / "out", tmp_path / "whole")
    eventually(lambda: states(f"{array}_0")[-1] == "COMPLETED")
    assert set(states(f"{array}_0")) == {"REQUEUED", "COMPLETED"}
    (log,) = tmp_path.glob(f"out/slurm/*/{array}_0_*log.out")
    assert log.read_text().count("Calling checkpoint method") == states(f"{array}_0").count("REQUEUED")


@pytest.mark.parametrize(
    "words",
    [["scontrol", "requeue"], ["scancel", "--signal=USR2"]],
    ids=["requeued by hand", "the signal that comes before the time limit"],
)
def test_a_job_that_goes_back_into_the_queue(tmp_path: Path, whole: Path, words: list[str]) -> None:
    process = started(tmp_path)
    array = begun(tmp_path)
    slurm(*words, f"{array}_0")
    ends_well(process)
    assert_equal_stores(tmp_path, whole)
    assert eventually(lambda: "REQUEUED" in states(f"{array}_0") and "COMPLETED" in states(f"{array}_0"))
    (log,) = tmp_path.glob(f"slurm/*/{array}_0_*log.out")
    assert ("Caught signal SIGUSR2" in log.read_text()) == ("--signal=USR2" in words)


def test_a_cancelled_task(tmp_path: Path, whole: Path) -> None:
    process = started(tmp_path)
    array = begun(tmp_path)
    slurm("scancel", f"{array}_1")
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 1 and f"Slurm job {array}_1 ended (CANCELLED" in printed, printed
    ends_well(started(tmp_path))
    assert_equal_stores(tmp_path, whole)
    assert eventually(lambda: any(state.startswith("CANCELLED") for state in states(f"{array}_1")))


def test_the_submitting_process_is_killed(tmp_path: Path, whole: Path) -> None:
    process = started(tmp_path)
    begun(tmp_path)
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
    array = begun(tmp_path)
    (task,) = (
        line.split()[0] for line in slurm("squeue", "-h", "-r", "-j", array, "-w", "n1", "-o", "%i").splitlines()
    )
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
