"""Jobs for tests: a pack, and the few settings of a run that a test is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.compose.settings import RunSettings
from sweeps.planning.packs import PackPlan
from sweeps.running.job import Job

SECTIONS = {"block": "telemetry", "every": "checkpoint", "minutes": "checkpoint"}


def job_of(pack: PackPlan, out: Path, folder_id: str = "", *, block: int = 50, **settings: Any) -> Job:
    """On a CPU, with checkpoints where they are asked for."""
    given = {"device": "cpu", "block": block, "minutes": None, **settings}
    values = {f"{SECTIONS[name]}.{name}" if name in SECTIONS else name: value for name, value in given.items()}
    return Job(pack, RunSettings.of(values, out), folder_id)
