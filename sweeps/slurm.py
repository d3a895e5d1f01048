"""Packs as one Slurm array through submitit.

Each job writes into the shared store, so the store is the only thing that says whether a pack is done: nothing that
submitit pickled is ever read back here. Which job works at which pack stands in `<out>/slurm/jobs.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmInfoWatcher

from harness.config import ConfigError
from harness.store import read_pack_attrs
from sweeps.launch import Results, available_cores
from sweeps.run import Failed, Finished, Job, record_failure, train_pack

FOLDER = "slurm"
POLL_SECONDS = 2.0
ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SUSPENDED", "READY", "UNKNOWN")


def train_on_node(job: Job) -> None:
    """What a Slurm job runs: one pack on the cores that Slurm gave it."""
    import torch

    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", available_cores())))
    train_pack(job)


@dataclass(frozen=True)
class SlurmExecutor:
    """Submits packs and follows them. `options` are the launcher's fields (see hydra_plugins)."""

    options: Mapping[str, Any]
    wait: bool

    @staticmethod
    def check() -> None:
        """Raises ConfigError where there is no Slurm."""
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher=slurm: no sbatch on PATH; allowed here: local")

    def __call__(self, jobs: Sequence[Job]) -> Results:
        if not jobs:
            return
        folder = jobs[0].out / FOLDER
        running = {job: number for job in jobs if (number := _recorded(folder, job)) and _is_alive(number)}
        waiting = [job for job in jobs if job not in running]
        if waiting:
            running |= self._submit(folder, waiting)
        if not self.wait:
            return
        yield from _follow(running)

    def _submit(self, folder: Path, jobs: Sequence[Job]) -> dict[Job, str]:
        executor = submitit.SlurmExecutor(folder=folder / "%A", max_num_timeout=0)
        executor.update_parameters(**self._parameters())
        with executor.batch():
            submitted = [executor.submit(train_on_node, job) for job in jobs]
        numbers = {job: handle.job_id for job, handle in zip(jobs, submitted, strict=True)}
        _record(folder, numbers)
        return numbers

    def _parameters(self) -> dict[str, Any]:
        names = {"time": "time", "cpus": "cpus_per_task", "memory": "mem", "gpus": "gpus_per_node"}
        direct = ("partition", "account", "qos", "constraint")
        found = {names.get(k, k): v for k, v in self.options.items() if k in (*names, *direct) and v is not None}
        found["job_name"] = "sweep"
        found["setup"] = list(self.options["setup"])
        found["additional_parameters"] = dict(self.options["extra"])
        found["array_parallelism"] = self.options["parallel"]
        found["stderr_to_stdout"] = True
        found["use_srun"] = False
        return found


def _jobs_file(folder: Path) -> Path:
    return folder / "jobs.json"


def _record(folder: Path, numbers: Mapping[Job, str]) -> None:
    file = _jobs_file(folder)
    known = json.loads(file.read_text()) if file.exists() else {}
    known |= {job.pack.id: number for job, number in numbers.items()}
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(known, indent=1))
    os.replace(temporary, file)


def _recorded(folder: Path, job: Job) -> str | None:
    file = _jobs_file(folder)
    return json.loads(file.read_text()).get(job.pack.id) if file.exists() else None


def _is_alive(number: str) -> bool:
    return _state(number) in ALIVE


_WATCHER = SlurmInfoWatcher(delay_s=10)


def _state(number: str) -> str:
    """Slurm's word for the job's state; UNKNOWN while sacct has not heard of it."""
    _WATCHER.register_job(number)
    return str(_WATCHER.get_state(number, mode="force")).split()[0]


def _follow(running: dict[Job, str]) -> Results:
    """Yield each pack as it ends, and None in between."""
    while running:
        time.sleep(POLL_SECONDS)
        yield None
        for job, number in list(running.items()):
            ended: Finished | Failed | None = _finished(job)
            if ended is None and not _is_alive(number):
                ended = _finished(job) or _lost(job, number)
            if ended is not None:
                del running[job]
                yield ended


def _finished(job: Job) -> Finished | None:
    try:
        attributes = read_pack_attrs(job.out, job.pack.id)
    except KeyError:
        return None
    if not attributes["complete"]:
        return None
    idle = sum(
        trial["fault"]["kind"] != "none" and not any(event["changed"] for event in events)
        for trial, events in zip(attributes["trials"], attributes["faults"], strict=True)
    )
    return Finished(job.pack.id, tuple(attributes["outcome"]), idle)


def _lost(job: Job, number: str) -> Failed:
    log = job.out / FOLDER / number.split("_")[0] / f"{number}_0_log.out"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else "(no log)"
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    return record_failure(job, f"Slurm job {number} ended as {_state(number)}: {last}", f"{log}\n{tail}")
