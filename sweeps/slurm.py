"""Packs as Slurm arrays through submitit.

Each job writes into the shared store, so the store is the only thing that says whether a pack is done: nothing that
submitit pickled is ever read back here. Which job works at which pack stands in `<out>/slurm/packs/<pack>.json`.

A job that is told that its time is nearly over, or that another one needs its place, saves a checkpoint after the step
that is under way, and goes back into the queue; from there it goes on where it was. So does one whose node was lost.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from harness.checkpoint import Checkpoints, Stopped
from harness.config import ConfigError, trial_from_dict
from harness.store import write_atomically
from injectors import fault_types
from sweeps.local import SHARE_OF_MEMORY, Results, available_cores, signals_wait
from sweeps.planner import PackPlan, pack_seconds
from sweeps.run import Elsewhere, Failed, Finished, Job, finished, record_failure, train_pack_safely

FOLDER, PACKS = "slurm", "packs"
POLL_SECONDS = 2.0
LOST_SECONDS = 15.0  # a job has left the queue, and a network file system may still hide what it wrote


class OnNode:
    """What a Slurm job runs: some packs, one after the other, on the cores that Slurm gave it."""

    def __init__(self) -> None:
        self._asked: int | None = None  # the signal that has come
        self._checkpoints: Checkpoints | None = None  # of the pack in training

    def __call__(self, jobs: Sequence[Job]) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", available_cores())))
        warning = submitit.JobEnvironment._usr_sig()
        requeue = signal.getsignal(warning)  # by submitit, with what `checkpoint` returns; ends the process
        for number in (warning, signal.SIGTERM):
            signal.signal(number, self._stop)
        failed = []
        for job in jobs:
            self._checkpoints = job.checkpoints
            self._checkpoints.is_stopping = self._asked is not None
            try:
                result = train_pack_safely(job, self._checkpoints)
            except Stopped:
                if self._asked == warning and callable(requeue):
                    requeue(warning, None)
                sys.exit(f"stopped by {signal.Signals(self._asked or 0).name}; a checkpoint is saved")
            if isinstance(result, Elsewhere):
                failed.append(f"pack {job.pack.id} is being trained by another process")
            elif isinstance(result, Failed):
                failed.append(f"{result.reason}; trace in {result.trace}")
        if failed:
            raise RuntimeError("\n".join(failed))  # so that Slurm calls the job failed, too

    def checkpoint(self, jobs: Sequence[Job]) -> submitit.helpers.DelayedSubmission:
        """What submitit is to run when the job comes back from the queue."""
        return submitit.helpers.DelayedSubmission(OnNode(), jobs)

    def _stop(self, number: int, frame: object) -> None:
        self._asked = number
        if self._checkpoints:
            self._checkpoints.is_stopping = True


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
        groups = together(jobs, self.options["parallel"], 60 * self.options["minutes_per_job"])
        most = _longest_array()
        arrays = [groups[start : start + most] for start in range(0, len(groups), most)]
        numbers: dict[Job, str] = {}
        for array in arrays:
            executor = submitit.SlurmExecutor(folder=folder / "%A", max_num_timeout=self.options["requeues"])
            executor.update_parameters(**self._parameters(len(arrays)))
            with signals_wait():  # a job that runs but is not written down would be submitted again
                with executor.batch():
                    handles = [executor.submit(OnNode(), group) for group in array]
                for group, handle in zip(array, handles, strict=True):
                    for job in group:
                        _write_down(job, handle.job_id)
                        numbers[job] = handle.job_id
        return numbers

    def _parameters(self, arrays: int) -> dict[str, Any]:
        names = {"time": "time", "cpus": "cpus_per_task", "memory": "mem", "gpus": "gpus_per_node"}
        direct = ("partition", "account", "qos", "constraint")
        found = {names.get(k, k): v for k, v in self.options.items() if k in (*names, *direct) and v is not None}
        found["job_name"] = "sweep"
        # Since Slurm 22.05 a step does not take this over by itself.
        cores = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'
        found["setup"] = [cores, *self.options["setup"]]
        found["additional_parameters"] = dict(self.options["extra"])
        found["signal_delay_s"] = self.options["warning"]
        found["array_parallelism"] = math.ceil(self.options["parallel"] / arrays)
        found["stderr_to_stdout"] = True
        return found


def together(jobs: Sequence[Job], parallel: int, seconds: float) -> list[list[Job]]:
    """Which packs share a Slurm job: as many as take about `seconds`, but no fewer jobs than can run in parallel."""
    times = [pack_seconds(job.pack, job.device) for job in jobs]
    limit = min(seconds, sum(times) / max(1, parallel))
    groups: list[list[Job]] = []
    room = 0.0
    for job, time_needed in zip(jobs, times, strict=True):
        if time_needed > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(job)
        room -= time_needed
    return groups


def _longest_array() -> int:
    """Tasks that one array may have, by Slurm's configuration."""
    answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer, flags=re.MULTILINE)
    return max(1, int(found[1]) - 1) if found else 1000


def _write_down(job: Job, number: str) -> None:
    """Keep which Slurm job trains this pack, and the pack itself, as JSON."""
    record = {
        "job": number,
        "device": job.device,
        "block": job.block,
        "every": job.every,
        "minutes": job.minutes,
        "trials": [trial.to_dict() for trial in job.pack.trials],
        "witnesses": sorted(job.pack.witnesses),
    }
    file = job.out / FOLDER / PACKS / f"{job.pack.id}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(record).encode())


def _submitted(out: Path) -> dict[Job, str]:
    """Every pack that was submitted for this store, with the Slurm job that was the last to train it."""
    found = {}
    for file in sorted((out / FOLDER / PACKS).glob("*.json")):
        record = json.loads(file.read_text())
        trials = tuple(trial_from_dict(values, fault_types()) for values in record["trials"])
        pack = PackPlan(trials, frozenset(record["witnesses"]))
        job = Job(pack, out, record["device"], record["block"], record["every"], record["minutes"])
        found[job] = record["job"]
    return found


def queued_jobs(out: Path) -> dict[str, tuple[str, str]]:
    """The packs that were submitted for this store and have not left Slurm's queue: their job, and its state.

    Raises ConfigError if Slurm does not answer.
    """
    submitted = {job.pack.id: number for job, number in _submitted(out).items()}
    states = _queued(submitted.values())
    if states is None:
        raise ConfigError(f"out={out}: its packs were submitted, and squeue does not answer; allowed: a running Slurm")
    return {pack: (number, states[number]) for pack, number in submitted.items() if number in states}


def _queued(numbers: Iterable[str]) -> dict[str, str] | None:
    """Which of these jobs are pending or running, and their states; None if Slurm does not answer just now.

    From squeue, which is exact: sacct hears of a job seconds later, and of some cancelled array tasks never.
    """
    arrays = sorted({number.split("_")[0] for number in numbers})
    if not arrays:
        return {}
    command = ["squeue", "--noheader", "--array", "--format=%i %T", f"--jobs={','.join(arrays)}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())


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
            ended: Finished | Failed | None = finished(job)
            if ended is None and queued is not None and number not in queued:
                waited = time.monotonic() - left_at.setdefault(job, time.monotonic())
                ended = _lost(job, number) if waited > LOST_SECONDS else None
            if ended is not None:
                del running[job]
                yield ended


def _lost(job: Job, number: str) -> Failed:
    """What is known of a job that has left the queue without finishing its pack."""
    if job.error_file.exists():
        return Failed(job.pack.id, job.error_file.read_text().splitlines()[0], job.error_file)
    log = job.out / FOLDER / number.split("_")[0] / f"{number}_0_log.out"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else "(no log)"
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    return record_failure(job, f"Slurm job {number} ended ({_last_state(number)}): {last}", f"{log}\n{tail}")
