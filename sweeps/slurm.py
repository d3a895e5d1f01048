"""Packs as Slurm arrays through submitit: what is submitted, and how it is followed. `sweeps/on_node.py` is what runs.

Each job writes into the shared store, so the store is the only thing that says whether a pack is done: nothing that
was pickled for a job is ever read back here. `<out>/slurm/<token>/` has an array's script, what its jobs are to run,
and their logs. All that a job needs is there before sbatch is called, whatever becomes of this process afterwards.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import submitit

from harness.config import ConfigError, Problems
from harness.stored import written_at
from sweeps.current_folder import python_path
from sweeps.local import SHARE_OF_MEMORY, Results, signals_wait
from sweeps.on_node import OnNode
from sweeps.planner import PackPlan, check_weights, pack_seconds
from sweeps.run import Failed, Finished, Job, finished, record_failure
from sweeps.submitted import FOLDER, NAME, queued_jobs, read_notes, states_of, submitting, write_down_all

POLL_SECONDS = 2.0
EARLIER_SECONDS = 45  # by as much a warning may come earlier (Slurm looks every 30 s), and a job takes so long to start
LOST_SECONDS = 15.0  # a job has left the queue, and a network file system may still hide what it wrote


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
        """This one: the memory of a job is `hydra.launcher.memory`, which Slurm watches over.

        Raises ConfigError where that is too little for the weights of a single trial.
        """
        check_weights((pack.trials[0] for pack in packs), self.memory("cpu"))
        return self

    @staticmethod
    def check() -> None:
        """Raises ConfigError where there is no Slurm."""
        if shutil.which("sbatch") is None:
            raise ConfigError("hydra/launcher=slurm: no sbatch on PATH; allowed here: local")

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        """Raises ConfigError if they contradict each other."""
        problems, key = Problems(), "hydra.launcher"
        with problems.collect():
            gpus, per_task = options["gpus"], options["gpus_per_task"]
            if gpus is not None and per_task is not None:
                raise ConfigError(f"{key}.gpus={gpus} {key}.gpus_per_task={per_task}: both given; allowed: one of them")
        with problems.collect():
            minutes, seconds = options["time"], options["warning"]
            most = 60 * minutes - EARLIER_SECONDS
            if minutes >= 1 and seconds > most:
                reason = f"a job of {key}.time={minutes} minutes may be told while it is still starting"
                raise ConfigError(f"{key}.warning={seconds}: {reason}; allowed: <= {most}")
        for name, value in options["extra"].items():
            with problems.collect():
                if name.replace("_", "-") in ("job-name", "array"):
                    raise ConfigError(f"{key}.extra.{name}={value}: set by the sweep itself; allowed: other options")
        problems.check()

    def running(self, out: Path) -> list[Job]:
        """Packs that stand in Slurm's queue for this store. Raises ConfigError if Slurm does not answer."""
        queued = queued_jobs(out)
        return [job for job in read_notes(out) if job.pack.id in queued]

    def __call__(self, jobs: Sequence[Job], running: Sequence[Job]) -> Results:
        notes = read_notes(running[0].out) if running else {}
        numbers = {job: notes[job] for job in running}
        if jobs:
            numbers |= self._submit(jobs)
        if self.wait:
            yield from _follow(numbers)

    def _submit(self, jobs: Sequence[Job]) -> dict[Job, str]:
        for job in jobs:
            job.error_file.unlink()
        arrays = self._arrays(jobs)
        numbers: dict[Job, str] = {}
        for array in arrays:
            numbers |= self._submit_array(array, math.ceil(self.options["parallel"] / len(arrays)))
        return numbers

    def _arrays(self, jobs: Sequence[Job]) -> list[list[list[Job]]]:
        """The packs of each job of each array. All packs of an array are trained by the same number of processes."""
        most, seconds = _longest_array(), 60 * self.options["minutes_per_job"]
        alike: dict[int, list[Job]] = {}
        for job in jobs:
            alike.setdefault(job.processes, []).append(job)
        found = []
        for own in alike.values():
            groups = together(own, self.options["parallel"], seconds)
            found += [groups[start : start + most] for start in range(0, len(groups), most)]
        return found

    def _submit_array(self, groups: Sequence[Sequence[Job]], parallel: int) -> dict[Job, str]:
        """One call of sbatch: task i of the array trains group i."""
        out, token = groups[0][0].out, uuid.uuid4().hex[:12]
        script = self._script(out / FOLDER / token, groups, parallel)
        with signals_wait(), submitting(out, token, groups) as lock:
            return write_down_all(groups, _sbatch(script, token, lock))

    def _script(self, folder: Path, groups: Sequence[Sequence[Job]], parallel: int) -> Path:
        """Write what sbatch needs, and what each job needs."""
        folder.mkdir(parents=True)
        executor = submitit.SlurmExecutor(folder=folder, max_num_timeout=self.options["requeues"])
        executor.update_parameters(**self._parameters(folder, groups[0][0].processes), array_parallelism=parallel)
        executor.parameters["map_count"] = len(groups)
        for number, group in enumerate(groups):
            submission = submitit.helpers.DelayedSubmission(OnNode(), group)
            submission.set_timeout(self.options["time"], self.options["requeues"])
            submission.dump(folder / f"{number}.pkl")
        script = folder / "submission.sh"
        script.write_text(executor._make_submission_file_text(executor._submitit_command_str, ""))
        return script

    def _parameters(self, folder: Path, processes: int) -> dict[str, Any]:
        names = {"time": "time", "cpus": "cpus_per_task", "memory": "mem", "gpus": "gpus_per_node"}
        direct = ("partition", "account", "qos", "constraint", "gpus_per_task")
        found = {names.get(k, k): v for k, v in self.options.items() if k in (*names, *direct) and v is not None}
        found["cpus_per_task"] *= processes  # one task, which starts the others itself
        # Since Slurm 22.05 a step does not take this over by itself.
        cores = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'
        found["setup"] = [cores, *_search_path(), _take_over(folder), *self.options["setup"]]
        tasks = {"ntasks": 1} if "gpus_per_task" in found else {}  # sbatch refuses the one without the other
        found["additional_parameters"] = tasks | self.options["extra"]
        found["signal_delay_s"] = self.options["warning"]
        found["stderr_to_stdout"] = True
        return found


def together(jobs: Sequence[Job], parallel: int, seconds: float) -> list[list[Job]]:
    """Which packs share a Slurm job: as many as take about `seconds`, but no fewer jobs than can run in parallel."""
    times = [pack_seconds(job.pack, job.device) for job in jobs]
    groups: list[list[Job]] = []
    room, remaining = 0.0, sum(times)
    for number, (job, needed) in enumerate(zip(jobs, times, strict=True)):
        free = parallel - len(groups)  # jobs that could run beside those that there are
        if not groups or needed > room + 1e-6 or len(jobs) - number <= free:
            groups.append([])
            room = min(seconds, remaining / max(1, free))
        groups[-1].append(job)
        room -= needed
        remaining -= needed
    return groups


def _search_path() -> list[str]:
    """The shell lines by which a job imports nothing from the folder in which it was submitted."""
    path = python_path()
    return ["export PYTHONSAFEPATH=1", *([f"export PYTHONPATH={shlex.quote(path)}"] if path else [])]


def _take_over(folder: Path) -> str:
    """The shell line with which a job puts what it is to run where submitit looks for it: by the job's number.

    A job that comes back from the queue finds it there already.
    """
    task, job = "${SLURM_ARRAY_TASK_ID}", "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    place = shlex.quote(str(folder))
    return f"mv {place}/{task}.pkl {place}/{job}_submitted.pkl 2>/dev/null || true"


def _longest_array() -> int:
    """Tasks that one array may have, by Slurm's configuration."""
    answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer, flags=re.MULTILINE)
    return max(1, int(found[1])) if found else 1000


def _sbatch(script: Path, token: str, lock: IO[str]) -> str:
    """Submit, and return the array's number.

    sbatch holds the lock, too: where this process is killed meanwhile, the next one waits until sbatch has ended.
    Raises ConfigError if it refuses; whether Slurm has the array nevertheless, the next command asks.
    """
    command = ["sbatch", "--parsable", f"--job-name={NAME}{token}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=(lock.fileno(),))
    number = re.search(r"^\d+", done.stdout, flags=re.MULTILINE)
    if done.returncode or number is None:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
        raise ConfigError(f"hydra/launcher=slurm: {said}; allowed: options that sbatch takes here")
    return number[0]


def _last_state(number: str) -> str:
    """Slurm's last word on a job that has left the queue."""
    command = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={number}"]
    words = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return words or "no longer known to Slurm"


def _follow(running: dict[Job, str]) -> Results:
    """Yield each pack as it ends, and None in between."""
    left_at: dict[Job, float] = {}
    read_at: dict[Job, int | None] = {}  # thousands of packs may wait: each is read again where it was written again
    while running:
        time.sleep(POLL_SECONDS)
        yield None
        queued = states_of(running.values())
        for job, number in list(running.items()):
            has_left, written = queued is not None and number not in queued, written_at(job.out, job.pack.id)
            ended: Finished | Failed | None = None
            if has_left or written != read_at.get(job):
                ended, read_at[job] = finished(job), written
            if ended is None and has_left:
                waited = time.monotonic() - left_at.setdefault(job, time.monotonic())
                ended = _lost(job, number) if waited > LOST_SECONDS else None
            if ended is not None:
                del running[job]
                yield ended


def _lost(job: Job, number: str) -> Failed:
    """What is known of a job that has left the queue without finishing its pack."""
    if job.error_file.exists():
        lines = job.error_file.read_bytes().decode(errors="replace").splitlines()
        return Failed(job.pack.id, (lines or ["no trace"])[0], job.error_file.path)
    log = next((job.out / FOLDER).glob(f"*/{number}_0_log.out"), None)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log else "(no log)"
    last = next((line for line in reversed(tail.splitlines()) if line.strip()), "")
    return record_failure(job, f"Slurm job {number} ended ({_last_state(number)}): {last}", f"{log}\n{tail}")
