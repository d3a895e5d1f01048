"""Sweeps on a real two-node Slurm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import analysis
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
from tests.sweeps.command import tree

pytestmark = pytest.mark.slurm

CAMPAIGN = ["fault=value", "fault.model=stuck_at_0", "fault.site=weight,gradient,activation", "fault.samples=12"]


def test_a_width_of_the_quickstart_grid_gives_the_bits_of_a_local_run(tmp_path: Path) -> None:
    short = [
        "train.steps=6",
        "schedule.warmup=2",
        "fault.start=3",
        "train.validate_every=3",
        "train.validate_tokens=16",
        "train.validate_between=16",
    ]
    axes = ["model.width=32", "optim.lr=1e-2,1e-1,1", "seed=0", "fault=none,weight_bit,rare_tokens"]
    grid = ["study=quickstart", *short, *axes]
    local = sweep(tmp_path / "local", *grid)
    assert local.status == 0, local.err
    remote = sweep(tmp_path / "slurm", *grid, *LAUNCH, "hydra.launcher.parallel=4")
    assert remote.status == 0, remote.out + remote.err
    assert "trained 18 of 18 trials" in remote.out
    assert_equal_stores(tmp_path / "local", tmp_path / "slurm")
    seen = nodes_used(tmp_path / "slurm")
    assert seen <= {"n1", "n2"}
    small = ["model.width=16,24,32,40", "train.steps=10", *SMALL, *LAUNCH, "hydra.launcher.minutes_per_job=0"]

    def both_nodes_have_been_used() -> bool:
        """Another test's job may hold one of them for minutes; then a further sweep has to come upon both."""
        if seen != {"n1", "n2"}:
            out = tmp_path / f"more {time.monotonic()}"
            assert sweep(out, *small).status == 0
            seen.update(nodes_used(out))
        return seen == {"n1", "n2"}

    assert eventually(both_nodes_have_been_used, seconds=600)


def nodes_used(out: Path) -> set[str]:
    """The nodes on which the packs of a finished sweep were trained, by sacct; every job has to be there, completed."""
    (array,) = arrays(out)
    jobs = len({json.loads(file.read_text())["job"] for file in (out / "slurm" / "packs").iterdir()})

    def of_completed_jobs() -> list[str]:
        rows = slurm("sacct", "-X", "-n", "-P", "-o", "State,NodeList", "-j", array).split()
        nodes = [row.split("|")[1] for row in rows if row.startswith("COMPLETED|")]
        return nodes if len(nodes) == jobs else []

    return set(eventually(of_completed_jobs))


def test_a_campaign_gives_the_bits_of_a_local_run(tmp_path: Path) -> None:
    """And of its idle faults the same number, though Slurm's jobs tell it by way of the store."""
    grid = [*CAMPAIGN, "model.width=16", "train.steps=10", "fault.start=3", "fault.until=8", *SMALL]
    grid.append("keep=weights")
    local, remote = sweep(tmp_path / "local", *grid), sweep(tmp_path / "slurm", *grid, *ONE_JOB)
    for done in (local, remote):
        assert done.status == 0, done.out + done.err
    assert_equal_stores(tmp_path / "local", tmp_path / "slurm")
    changes = analysis.open_sweep(tmp_path / "slurm").changes.values
    assert len(changes) == 36 + 8 + 1
    here, there = (tree(tmp_path / where / "weights") for where in ("local", "slurm"))
    assert len(here) == 2 * len(changes)
    assert {name: own.split()[0] for name, own in here.items()} == {n: own.split()[0] for n, own in there.items()}
    idle = int((changes == 0).sum()) - 1  # the golden trial has no fault
    assert idle > 1
    for done in (local, remote):
        assert "trained 45 of 45 trials" in done.out
        assert f"{idle} faults never fired, or wrote the value that was there\n" in done.out


def test_a_campaign_that_stops_by_itself_goes_on_where_it_was_left(tmp_path: Path) -> None:
    """Nobody waits: each call looks at what has ended, and submits the next round once that is all."""
    grid = [*CAMPAIGN[:2], "fault.samples=6", "campaign.round=4", "campaign.width=0.1", "campaign.envelope=0"]
    line = [*grid, "model.width=16", "train.steps=10", "fault.start=3", *SMALL, *LAUNCH]
    assert "1 pack submitted" in sweep(tmp_path, *line, "wait=false").out
    (array,) = arrays(tmp_path)
    eventually(lambda: not slurm("squeue", "-h", "-j", array, "-t", "PD,R,CG").strip())
    again = sweep(tmp_path, *line, "wait=false")
    assert again.status == 0, again.err
    assert " after 4 faults of each description" in again.out and "1 pack submitted" in again.out
    assert sweep(tmp_path, *line).status == 0
    assert len(arrays(tmp_path)) == 2, "one for each round"
    done = analysis.open_sweep(tmp_path)
    assert done.sizes["trial"] == 6 + 1 and bool(done.complete.all())


def test_the_same_or_a_wider_grid_submits_only_what_is_neither_stored_nor_queued(tmp_path: Path) -> None:
    for _ in range(2):
        done = sweep(tmp_path, *GRID, *ONE_JOB, "wait=false")
        assert done.status == 0, done.err
    assert len(arrays(tmp_path)) == 1, "nothing may be submitted twice"
    wider = sweep(tmp_path, *GRID, *ONE_JOB, "seed=0,1")
    assert wider.status == 0, wider.err
    packs = {path.parent.name: path for path in tmp_path.glob("store.zarr/*/zarr.json")}
    done = analysis.open_sweep(tmp_path)
    assert done.sizes["trial"] == 8 and bool(done.complete.all())
    assert len(packs) == 4 and len(arrays(tmp_path)) == 2, "each trial stands in one pack"
    assert "4 complete already" in sweep(tmp_path, *GRID, *ONE_JOB).out
    # The sweep ends when the store is complete, and its job leaves submitit's result there a moment later.
    submitted = ",".join(arrays(tmp_path))
    eventually(lambda: not slurm("squeue", "--noheader", f"--jobs={submitted}", "--states=PD,R,CG"))
    before = tree(tmp_path)
    for out in (tmp_path, tmp_path / "fresh"):
        refused = sweep(out, *GRID, "seed=3", *ONE_JOB, "hydra.launcher.partition=nowhere")
        (line,) = refused.err.splitlines()
        assert refused.status == 2 and line.startswith("error: hydra/launcher=slurm: sbatch: "), line
        assert "invalid partition" in line
    assert tree(tmp_path) == before and len(arrays(tmp_path)) == 2, "what sbatch refuses leaves nothing"
    assert not (tmp_path / "fresh").exists()


def test_the_launchers_options_reach_slurm(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    options = [
        "partition=debug",
        "account=research",
        "qos=high",
        "cpus=1",
        "gpus_per_task=1",
        f"setup=['touch {marker}']",
    ]
    done = sweep(
        tmp_path / "out",
        "model.width=16",
        "train.steps=5",
        *SMALL,
        *LAUNCH,
        *(f"hydra.launcher.{option}" for option in options),
        "+hydra.launcher.extra.comment=stability",
    )
    assert done.status == 0, done.out + done.err
    assert marker.exists()
    (array,) = arrays(tmp_path / "out")
    fields = "Partition,Account,QOS,TimelimitRaw,ReqCPUS,ReqMem,Comment"
    wanted = "debug|research|high|5|1|1G|"

    def as_wanted() -> bool:
        return slurm("sacct", "-X", "-n", "-P", "-o", fields, "-j", array).startswith(wanted)

    eventually(as_wanted)
    (script,) = tmp_path.glob("out/slurm/*/submission.sh")
    assert "--comment=stability" in script.read_text()


INTERRUPTED = """
import os, signal
from harness.storage.results_folder import ResultsPath
from sweeps.commands.sweep import main

write = ResultsPath.write
def interrupted(path, content):
    write(path, content)
    if path.names[-2:-1] == ("packs",):  # the first of two notes
        ResultsPath.write = write
        os.kill(os.getpid(), signal.SIGINT)
ResultsPath.write = interrupted
main()
"""


def test_control_c_leaves_the_jobs_to_slurm_while_it_writes_them_down(tmp_path: Path) -> None:
    line = [f"out={tmp_path}", "device=cpu", *GRID, *ONE_JOB]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    goes_on_with_one_array(tmp_path)


def test_control_c_leaves_the_jobs_to_slurm_while_it_waits_for_them(tmp_path: Path) -> None:
    process = started(tmp_path, *GRID, *ONE_JOB)
    eventually(lambda: len(list(tmp_path.glob("slurm/packs/*.json"))) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    goes_on_with_one_array(tmp_path)


def goes_on_with_one_array(out: Path) -> None:
    assert len(list(out.glob("slurm/packs/*.json"))) == 2
    assert sweep(out, *GRID, *ONE_JOB).status == 0
    assert len(arrays(out)) == 1
    done = analysis.open_sweep(out)
    assert done.sizes["trial"] == 4 and bool(done.complete.all())
