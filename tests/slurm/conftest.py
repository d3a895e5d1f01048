"""A real Slurm: brought up by `make slurm`, which CI calls first."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.sweeps.conftest import unchanged_process

__all__ = ["unchanged_process"]


@pytest.fixture(scope="session", autouse=True)
def slurm() -> None:
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
