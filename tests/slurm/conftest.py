"""A real Slurm, brought up by `make slurm`, which CI calls first; and what its tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import analysis
from harness.storage.results_folder import ResultsPath
from sweeps.slurm.squeue import name_of
from tests.sweeps.command import REPOSITORY, Ended, call, fork
from tests.sweeps.conftest import unchanged_process
from tests.sweeps.forks import Forked

__all__ = ["unchanged_process"]

T = TypeVar("T")

SMALL = ["model.depth=1", "model.head_dim=8", "model.context=16", "train.batch=2", "train.validate_every=5"]
GRID = ["model.width=16,32", "train.steps=10", "fault=none,weight_bit", "fault.start=5", *SMALL]
LAUNCH = ["hydra/launcher=slurm", "hydra.launcher.time=5", "hydra.launcher.memory=1GB"]
ONE_JOB = [*LAUNCH, "hydra.launcher.parallel=1"]  # for all packs


def sweep(out: Path, *arguments: str) -> Ended:
    """The command in this process."""
    return call(f"out={out}", "device=cpu", *arguments)


def started(out: Path, *arguments: str, **variables: str) -> Forked:
    """The command in a process of its own."""
    return fork(f"out={out}", "device=cpu", *arguments, cwd=REPOSITORY, **variables)


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def eventually(condition: Callable[[], T], seconds: float = 240) -> T:
    """The first true value of `condition`; sacct hears of jobs some seconds late, and other tests use the nodes too."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)
    return value


def arrays(out: Path) -> list[str]:
    """The arrays that were submitted for `out`, as Slurm knows them: by the names that their scripts' folders give."""
    scripts = list(out.glob("slurm/*/submission.sh"))
    names = [name_of(ResultsPath.open(out), script.parent.name) for script in scripts]
    words = ["squeue", "--noheader", "--states=all", "--format=%F", f"--name={','.join(names)}"]
    return sorted(set(slurm(*words).split()), key=int) if names else []


def assert_equal_stores(one: Path, other: Path) -> None:
    first, second = (analysis.open_sweep(out).sortby("trial").load() for out in (one, other))
    assert list(first.trial.values) == list(second.trial.values)
    for name in first.data_vars:
        if name not in ("tokens_per_second", "step_seconds"):
            np.testing.assert_array_equal(first[name].values, second[name].values, err_msg=str(name))
    for name in ("outcome", "golden", "nonfinite_step", "masked_step", "strikes", "changes"):
        np.testing.assert_array_equal(first[name].values, second[name].values, err_msg=name)
    events = [analysis.fault_events(out).drop(columns="pack") for out in (one, other)]
    first_events, second_events = (e.sort_values(["trial", "step"], ignore_index=True) for e in events)
    assert first_events.equals(second_events)


@pytest.fixture(scope="session", autouse=True)
def two_nodes() -> None:
    """Fail in CI, skip elsewhere, where no Slurm with two idle or busy nodes answers."""
    answer = ""
    if shutil.which("sinfo"):
        answer = subprocess.run(["sinfo", "--noheader", "--format=%D %T"], capture_output=True, text=True).stdout
    up = sum(int(line.split()[0]) for line in answer.splitlines() if line.split()[1] in ("idle", "mixed", "allocated"))
    if up < 2:
        reason = f"needs a running Slurm with two nodes (make slurm); sinfo says {answer.strip() or 'nothing'!r}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
