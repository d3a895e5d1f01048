"""Searches whose packs are trained on a real two-node Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.conftest import ONE_JOB, SMALL, arrays, assert_equal_stores, eventually, slurm, sweep

pytestmark = pytest.mark.slurm

EDGE = ["search=max_stable_lr", "model.width=16,32", "optim.lr=0.1,1.0,10.0", "seed=range(2)", "train.steps=20", *SMALL]


def test_a_search_that_nobody_waits_for_is_that_of_a_local_run(tmp_path: Path) -> None:
    """Each call tells what has ended, and submits the next round once that is all."""
    local = sweep(tmp_path / "local", *EDGE)
    assert local.status == 0, local.err
    found = local.out.splitlines()[-4:-1]  # before the place of the results
    assert found[0].startswith("search=max_stable_lr: ") and "optim.lr" in found[1]
    calls = 0
    while calls < 6:
        calls += 1
        done = sweep(tmp_path / "slurm", *EDGE, *ONE_JOB, "wait=false")
        assert done.status == 0, done.out + done.err
        if done.out.splitlines()[-4:-1] == found:
            break
        assert "submitted" in done.out
        submitted = ",".join(arrays(tmp_path / "slurm"))
        eventually(lambda jobs=submitted: not slurm("squeue", "-h", "-j", jobs, "-t", "PD,R,CG").strip())
    assert done.out.splitlines()[-4:-1] == found and calls > 2
    assert_equal_stores(tmp_path / "local", tmp_path / "slurm")
