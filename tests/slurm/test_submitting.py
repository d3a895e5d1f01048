"""What is submitted, and how often: kills at the worst moment, refusals, shared jobs, long arrays, GPUs."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

import analysis
from sweeps.compose.settings import SlurmOptions
from sweeps.planning.planner import make_plan, pack_seconds
from sweeps.slurm.executor import SlurmExecutor, together
from tests.jobs import job_of
from tests.slurm.conftest import (
    GRID,
    LAUNCH,
    ONE_JOB,
    SMALL,
    arrays,
    assert_equal_stores,
    eventually,
    slurm,
    started,
    sweep,
)
from tests.sweeps.command import call, trials

pytestmark = pytest.mark.slurm


def put_on_path(folder: Path, name: str, script: str) -> str:
    """A PATH on which a shell script stands before a command of Slurm's, which it calls as $real.

    Not where Slurm is only asked whether it would take the options.
    """
    folder.mkdir()
    test = '[[ $1 == --test-only ]] && exec $real "$@"'
    (folder / name).write_text(f"#!/bin/bash\nreal={shutil.which(name)}\n{test}\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


# --- a sweep that is killed around sbatch ---------------------------------------------------------------------------

# $PPID is the sweep. Jobs are held, so that they are in the queue until the test lets them go.
KILLS = {
    "sbatch was never called": "kill -KILL $PPID",
    "sbatch has not asked Slurm yet": 'kill -KILL $PPID; sleep 3; exec $real --hold "$@"',
    "sbatch has answered": '$real --hold "$@" && kill -KILL $PPID',
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a sweep that nothing happened to."""
    out = tmp_path_factory.mktemp("whole")
    assert sweep(out, *GRID).status == 0
    return out


@pytest.mark.parametrize("when", KILLS)
def test_a_sweep_that_is_killed_around_sbatch_submits_each_pack_once(tmp_path: Path, whole: Path, when: str) -> None:
    jobs = 2 if when == "sbatch has answered" else 1
    out, line = tmp_path / "out", [*GRID, *LAUNCH, f"hydra.launcher.parallel={jobs}"]
    killed = started(out, *line, PATH=put_on_path(tmp_path / "bin", "sbatch", KILLS[when]))
    assert killed.wait(timeout=60) == -signal.SIGKILL, killed.communicate()
    assert list(out.glob("slurm/submitting/*.json")) and not list(out.glob("slurm/packs/*"))
    again = sweep(out, *line, "wait=false")
    if when == "sbatch was never called":
        assert "2 packs submitted, 0 in the queue already" in again.out, again.err
    else:
        assert "0 packs submitted, 2 in the queue already" in again.out, again.err
    assert not list(out.glob("slurm/submitting/*")) and len(list(out.glob("slurm/packs/*"))) == 2
    (array,) = arrays(out)
    assert call("status", str(out)).out.count(f"Slurm job {array}_") == 2
    slurm("scontrol", "release", array)
    assert sweep(out, *line).status == 0
    assert arrays(out) == [array]
    rows = ["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", array]
    eventually(lambda: sorted(slurm(*rows).split()) == [f"{array}_{job}|COMPLETED" for job in range(jobs)])
    assert_equal_stores(out, whole)


def test_jobs_of_a_killed_sweep_run_without_it(tmp_path: Path) -> None:
    """And the same command finds them done, long after Slurm has forgotten their names."""
    out, line = tmp_path / "out", [*GRID, *ONE_JOB]
    killed = started(out, *line, PATH=put_on_path(tmp_path / "bin", "sbatch", '$real "$@" && kill -KILL $PPID'))
    assert killed.wait(timeout=60) == -signal.SIGKILL, killed.communicate()
    eventually(lambda: not slurm("squeue", "-h", "-j", arrays(out)[0]).strip())
    assert "4 complete already" in sweep(out, *line).out
    assert not list(out.glob("slurm/submitting/*")) and len(arrays(out)) == 1


# --- what an array is made of ---------------------------------------------------------------------------------------

FOUR = ["model.width=16,24,32,40", "train.steps=10", *SMALL]


@pytest.mark.parametrize("order", ["as planned", "shortest first"])
def test_packs_are_put_together_as_far_as_they_would_wait_anyway(tmp_path: Path, order: str) -> None:
    """One that takes most of the time, and eight short ones; `share` of all their time is what a job may take."""
    given = trials("model.head_dim=4", "model.width=16,20,24,28,32,36,40,44,256")
    jobs = [job_of(pack, tmp_path) for pack in make_plan(given, (), 1, "cpu", 1).packs]
    jobs = jobs if order == "as planned" else jobs[::-1]
    seconds = {job: pack_seconds(job.pack, "cpu") for job in jobs}
    for parallel, share in itertools.product((1, 2, 3, 5, 9, 100), (0.0, 0.3, 1.0)):
        most = share * sum(seconds.values())
        groups = together(jobs, parallel, most)
        assert [job for group in groups for job in group] == jobs
        assert all(len(group) == 1 or sum(seconds[job] for job in group) <= most + 1e-3 for group in groups)
        assert len(groups) >= min(parallel, len(jobs))
        if share == 0:
            assert len(groups) == len(jobs)
        elif share == 1:
            assert len(groups) == min(parallel, len(jobs)), "no more jobs than can run at once"


def test_short_packs_share_a_job(tmp_path: Path) -> None:
    """With room for two jobs at a time, and ten minutes in each."""
    done = sweep(tmp_path, *FOUR, *LAUNCH, "hydra.launcher.parallel=2")
    assert done.status == 0, done.out + done.err
    assert sweep(tmp_path, *FOUR).out.count("4 complete already") == 1
    (array,) = arrays(tmp_path)
    tasks = slurm("squeue", "-h", "-t", "all", "-r", "-j", array, "-o", "%i").split()
    assert sorted(tasks) == [f"{array}_{task}" for task in range(len(tasks))] and 2 <= len(tasks) < 4
    assert len({file.stem for file in tmp_path.glob("slurm/packs/*.json")}) == 4


def test_an_array_is_no_longer_than_slurm_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own limit cannot be made small while others use it, so its answer is, when it is asked for that."""
    small = put_on_path(
        tmp_path / "bin", "scontrol", "$real \"$@\" | sed 's/^MaxArraySize .*/MaxArraySize            = 2/'"
    )
    monkeypatch.setenv("PATH", small)
    alone = ["hydra.launcher.minutes_per_job=0", "hydra.launcher.parallel=3"]
    done = sweep(tmp_path / "out", "model.width=16,24,32", *FOUR[1:], *LAUNCH, *alone)
    assert done.status == 0, done.out + done.err
    trained = analysis.open_sweep(tmp_path / "out")
    assert trained.sizes["trial"] == 3 and bool(trained.complete.all())
    scripts = [script.read_text() for script in tmp_path.glob("out/slurm/*/submission.sh")]
    assert sorted(re.findall(r"--array=(\S+)", " ".join(scripts))) == ["0-0%1", "0-1%2"]
    assert len(arrays(tmp_path / "out")) == 2


def options(**given: object) -> dict[str, object]:
    """The launcher's, as Hydra hands them over."""
    return {**vars(SlurmOptions()), **given}


@pytest.mark.parametrize(("ranks", "cores"), [("processes", ["3", "6", "12"]), ("simulated", ["3"])])
def test_packs_that_are_trained_by_several_processes_get_cores_for_each(
    tmp_path: Path, ranks: str, cores: list[str]
) -> None:
    given = trials("model.width=16", "train.ranks=1,2,4", "train.batch=8", "seed=0,1")
    jobs = [job_of(pack, tmp_path, ranks=ranks) for pack in make_plan(given, (), 2, "cpu", 1).packs]
    executor, found = SlurmExecutor(options(cpus=3), wait=True), []
    for groups in executor._arrays(jobs):
        script = executor._text(tmp_path, groups[0][0].processes, len(groups), 2)
        found += re.findall(r"^#SBATCH --cpus-per-task=(\d+)$", script, flags=re.MULTILINE)
        assert f"--array=0-{len(groups) - 1}%" in script
    assert sorted(found, key=int) == cores


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ["gpus=1", "gpus_per_task=1"],
            "hydra.launcher.gpus=1 hydra.launcher.gpus_per_task=1: both given; allowed: one",
        ),
        (["gpus_per_task=-1"], "hydra.launcher.gpus_per_task=-1: out of range; allowed: >= 0"),
        (
            ["time=2"],
            "hydra.launcher.warning=120: a job of hydra.launcher.time=2 minutes may be told while it is still ",
        ),
        (
            ["extra.job_name=mine"],
            "hydra.launcher.extra.job_name=mine: set by the sweep itself; allowed: other options",
        ),
    ],
)
def test_options_that_cannot_be_are_one_line(tmp_path: Path, given: list[str], expected: str) -> None:
    words = [f"{'+' * text.startswith('extra')}hydra.launcher.{text}" for text in given]
    ended = call(f"out={tmp_path / 'out'}", "model.width=16", "hydra/launcher=slurm", *words)
    assert (ended.status, ended.out) == (2, "") and not (tmp_path / "out").exists()
    (line,) = ended.err.splitlines()
    assert line.startswith(f"error: {expected}")


@pytest.mark.parametrize(("option", "gpus"), [("gpus_per_task=1", 1), ("gpus_per_task=2", 2), ("gpus=2", 2)])
def test_a_job_sees_the_gpus_that_it_asked_for(tmp_path: Path, option: str, gpus: int) -> None:
    """Slurm hands out two in each node; what it calls a GPU here is /dev/null. The job ends when it has seen them."""
    found = tmp_path / "found"
    line = ["model.width=16", "train.steps=5", *SMALL, *LAUNCH, f"hydra.launcher.{option}"]
    setup = f"hydra.launcher.setup=['srun --ntasks=1 printenv CUDA_VISIBLE_DEVICES > {found}','exit 3']"
    done = sweep(tmp_path / "out", *line, setup, "wait=false")
    assert done.status == 0, done.out + done.err
    assert len(eventually(lambda: found.exists() and found.read_text()).strip().split(",")) == gpus
    (script,) = tmp_path.glob("out/slurm/*/submission.sh")
    name = "--gpus-per-task=" if "task" in option else "--gpus-per-node="
    assert f"{name}{gpus}\n" in script.read_text()
