"""Packs as one Slurm array through submitit.

Each job writes into the shared store, so the store is the only thing that says whether a pack is done: nothing that
submitit pickled is ever read back here. Which job works at which pack stands in `<out>/slurm/packs/<pack>.json`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from harness.config import ConfigError, trial_from_dict
from harness.store import read_pack_attrs
from injectors import fault_types
from sweeps.local import SHARE_OF_MEMORY, Results, available_cores, signals_wait
from sweeps.planner import PackPlan
from sweeps.run import Failed, Finished, Job, record_failure, train_pack_safely

FOLDER, PACKS = "slurm", "packs"
POLL_SECONDS = 2.0
LOST_SECONDS = 15.0  # a job has left the queue, and a network file system may still hide what it wrote


def train_on_node(job: Job) -> None:
    """What a Slurm job runs: one pack on the cores that Slurm gave it."""
    import torch

    torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", available_cores())))
    result = train_pack_safely(job)
    if isinstance(result, Failed):
        raise RuntimeError(f"{result.reason}; trace in {result.trace}")  # so that Slurm calls the job failed, too


@dataclass(frozen=True)
class SlurmExecutor:
    """Submits packs and follows them. `options` are the launcher's fields (see hydra_plugins)."""

    options: Mapping[str, Any]
    wait: bool
    splits_over: int = 1  # a job takes seconds to start, so packs are as large as is fastest

    @property
    def workers(self) -> int:
        return self.options["parallel"]

    def memory(self, device: str) -> float:
        """Of a job's `hydra.launcher.memory`; what a node's GPU has is not known here."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", str(self.options["memory"]).upper())
        if device == "cuda" or found is None:
            return math.inf
        # As for sbatch --mem, a number without a unit counts megabytes, and 0 is all that a node has.
        return SHARE_OF_MEMORY * float(found[1]) * 1024 ** " KMGT".index(found[2] or "M") or math.inf

    def fitting(self, packs: Sequence[PackPlan]) -> SlurmExecutor:
        """This one: the memory of a job is `hydra.launcher.memory`, which Slurm watches over."""
        return self

    @staticmethod
    def check() -> None:
        """Raises ConfigError where there is no Slurm."""
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher=slurm: no sbatch on PATH; allowed here: local")

    def running(self, out: Path) -> list[Job]:
        """Packs that stand in Slurm's queue for this store. Raises ConfigError if Slurm does not answer."""
        submitted = _submitted(out)
        queued = _queued(submitted.values())
        if queued is None:
            raise ConfigError("hydra/launcher=slurm: squeue does not answer; allowed: a running Slurm, or local")
        return [job for job, number in submitted.items() if number in queued]

    def __call__(self, jobs: Sequence[Job], running: Sequence[Job]) -> Results:
        submitted = _submitted(running[0].out) if running else {}
        numbers = {job: submitted[job] for job in running}
        if jobs:
            numbers |= self._submit(jobs)
        if self.wait:
            yield from _follow(numbers)

    def _submit(self, jobs: Sequence[Job]) -> dict[Job, str]:
        folder = jobs[0].out / FOLDER
        for job in jobs:
            job.error_file.unlink(missing_ok=True)
        executor = submitit.SlurmExecutor(folder=folder / "%A", max_num_timeout=0)
        executor.update_parameters(**self._parameters())
        with signals_wait():  # a job that runs but is not written down would be submitted again
            with executor.batch():
                handles = [executor.submit(train_on_node, job) for job in jobs]
            numbers = {job: handle.job_id for job, handle in zip(jobs, handles, strict=True)}
            for job, number in numbers.items():
                _write_down(job, number)
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


def _write_down(job: Job, number: str) -> None:
    """Keep which Slurm job trains this pack, and the pack itself, as JSON."""
    record = {
        "job": number,
        "device": job.device,
        "block": job.block,
        "trials": [trial.to_dict() for trial in job.pack.trials],
        "witnesses": sorted(job.pack.witnesses),
    }
    file = job.out / FOLDER / PACKS / f"{job.pack.id}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(record))
    os.replace(temporary, file)


def _submitted(out: Path) -> dict[Job, str]:
    """Every pack that was submitted for this store, with the Slurm job that was the last to train it."""
    found = {}
    for file in sorted((out / FOLDER / PACKS).glob("*.json")):
        record = json.loads(file.read_text())
        trials = tuple(trial_from_dict(values, fault_types()) for values in record["trials"])
        pack = PackPlan(trials, frozenset(record["witnesses"]))
        found[Job(pack, out, record["device"], record["block"])] = record["job"]
    return found


def _queued(numbers: Iterable[str]) -> set[str] | None:
    """Which of these jobs are pending or running; None if Slurm does not answer just now.

    From squeue, which is exact: sacct hears of a job seconds later, and of some cancelled array tasks never.
    """
    arrays = sorted({number.split("_")[0] for number in numbers})
    if not arrays:
        return set()
    command = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(arrays)}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    return set(answer.stdout.split())


def _last_state(number: str) -> str:
    """Slurm's last word on a job that has left the queue."""
    command = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={number}"]
    words = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return words or "no longer known to Slurm"


def _follow(running: dict[Job, str]) -> Results:
    """Yield each pack as it ends, and None in between."""
    left_at: dict[Job, float] = {}
    while running:
        time.sleep(POLL_SECONDS)
        yield None
        queued = _queued(running.values())
        for job, number in list(running.items()):
            ended: Finished | Failed | None = _finished(job)
            if ended is None and queued is not None and number not in queued:
                waited = time.monotonic() - left_at.setdefault(job, time.monotonic())
                ended = _lost(job, number) if waited > LOST_SECONDS else None
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
        trial["fault"]["kind"] != "none" and not changes
        for trial, changes in zip(attributes["trials"], attributes["changes"], strict=True)
    )
    return Finished(job.pack.id, tuple(attributes["outcome"]), idle)


def _lost(job: Job, number: str) -> Failed:
    """What is known of a job that has left the queue without finishing its pack."""
    if job.error_file.exists():
        return Failed(job.pack.id, job.error_file.read_text().splitlines()[0], job.error_file)
    log = job.out / FOLDER / number.split("_")[0] / f"{number}_0_log.out"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else "(no log)"
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    return record_failure(job, f"Slurm job {number} ended ({_last_state(number)}): {last}", f"{log}\n{tail}")
