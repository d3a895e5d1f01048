"""Packs as Slurm arrays through submitit: what is submitted, and how it is followed.

`sweeps/slurm/on_node.py` is what runs.

Each job writes into the shared store, so the store is the only thing that says whether a pack is done: nothing that
was pickled for a job is ever read back here. `<out>/slurm/<token>/` has an array's script, what its jobs are to run,
and their logs. All that a job needs is there before sbatch is called, whatever becomes of this process afterwards.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit

from harness.basics.memory import bytes_of
from harness.basics.printing import complain, count
from harness.config import ConfigError, Problems
from harness.storage.progress_files import ERRORS
from harness.storage.results_folder import LinkRefused, ResultsPath
from harness.storage.stored import written_at
from sweeps.current_folder import python_path
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import check_weights, pack_seconds
from sweeps.running.job import Failed, Finished, Job, finished, record_failure
from sweeps.running.local import SHARE_OF_MEMORY, Results, signals_wait
from sweeps.slurm.on_node import OnNode
from sweeps.slurm.squeue import FOLDER, SCRIPT, TOKEN, Queued, name_of, queue_of, submitters
from sweeps.slurm.submitted import forget, running_jobs, submitting, write_down_all

POLL_SECONDS = 2.0
EARLIER_SECONDS = 45  # by as much a warning may come earlier (Slurm looks every 30 s), and a job takes so long to start
LOST_SECONDS = 15.0  # a job has left the queue, and a network file system may still hide what it wrote
OBSTACLE_SECONDS = 20.0  # a job has not been able to start: Slurm may just be looking for nodes
MOST_TAIL = 2**16  # bytes
PROBE = "sweep-options"
LEAST = dict.fromkeys(("time", "cpus", "parallel", "warning"), 1)
LEAST |= dict.fromkeys(("gpus", "gpus_per_task", "minutes_per_job", "requeues"), 0)
SET_BY_US = ("job-name", "array", "wait", "clusters", "test-only", "parsable")


@dataclass(frozen=True)
class SlurmExecutor:
    """Submits packs and follows them. `options` are the launcher's fields (see hydra_plugins)."""

    options: Mapping[str, Any]
    wait: bool
    splits_over: int = 1  # a job takes seconds to start, so packs are as large as is fastest

    @property
    def workers(self) -> int:
        return int(self.options["parallel"])

    def memory(self, device: str) -> float:
        """Of a job's `hydra.launcher.memory`; what a node's GPU has is not known here."""
        size = bytes_of(str(self.options["memory"]))
        if device == "cuda" or size is None:
            return math.inf
        return SHARE_OF_MEMORY * size or math.inf  # as for sbatch --mem, 0 is all that a node has

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
        """Raises ConfigError if one is out of range, or they contradict each other."""
        problems, key = Problems(), "hydra.launcher"
        for name, least in LEAST.items():
            with problems.collect():
                if options[name] is not None and options[name] < least:
                    raise ConfigError(f"{key}.{name}={options[name]}: out of range; allowed: >= {least}")
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
                if name.replace("_", "-") in SET_BY_US:
                    raise ConfigError(f"{key}.extra.{name}={value}: set by the sweep itself; allowed: other options")
        problems.check()

    def check_with_slurm(self, out: Path) -> None:
        """Raises ConfigError if Slurm refuses these options for a job of one process. Leaves nothing behind."""
        if re.search(r"[%\n]", str(out)):
            raise ConfigError(
                f"out={str(out)!r}: Slurm reads a % in a path as a number; allowed: a path without % here"
            )
        script = self._text(out / FOLDER / "test", 1, 1, 1)
        test = _sbatch("--test-only", input=script)
        if test.returncode == 0:
            return
        # Also said of jobs that Slurm would take and keep, as while all nodes are down. So it is given one that may
        # begin so late that it never does. (Of a held one it looks at less.)
        with signals_wait():
            number = _number(_sbatch("--parsable", "--begin=now+1day", f"--job-name={PROBE}", input=script))
            subprocess.run(["scancel", f"--name={PROBE}", number], capture_output=True)
        _warn(f"hydra/launcher=slurm: Slurm takes these options, but its jobs may not start ({_said(test)})")

    def running(self, out: Path) -> dict[Job, str]:
        """Packs that stand in Slurm's queue for this store, by number. Raises ConfigError as `running_jobs` does."""
        jobs, warnings = running_jobs(out)
        for line in warnings:
            _warn(line)
        return jobs

    def __call__(self, jobs: Sequence[Job], running: Mapping[Job, str]) -> Results:
        if not jobs and not running:
            return
        folder = ResultsPath.open([*jobs, *running][0].out)
        numbers = dict(running)
        if jobs:
            numbers |= self._submit(folder, jobs)
        if self.wait:
            yield from _follow(folder, numbers)

    def _submit(self, folder: ResultsPath, jobs: Sequence[Job]) -> dict[Job, str]:
        arrays = self._arrays(jobs)
        numbers: dict[Job, str] = {}
        for array in arrays:
            try:
                numbers |= self._submit_array(folder, array, math.ceil(self.options["parallel"] / len(arrays)))
            except ConfigError as error:
                stay = "stays" if len(numbers) == 1 else "stay"
                before = f"; {count(len(numbers), 'pack')} submitted before {stay} in the queue" if numbers else ""
                raise ConfigError(f"{error}{before}") from None
        return numbers

    def _arrays(self, jobs: Sequence[Job]) -> list[list[list[Job]]]:
        """The packs of each job of each array. All packs of an array are trained by the same number of processes."""
        alike: dict[int, list[Job]] = {}
        for job in jobs:
            alike.setdefault(job.processes, []).append(job)
        answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True).stdout
        size = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer, flags=re.MULTILINE)
        most = max(1, int(size[1])) if size else 1000  # tasks of one array
        arrays = []
        for same in alike.values():
            groups = together(same, self.options["parallel"], 60 * self.options["minutes_per_job"])
            arrays += [groups[start : start + most] for start in range(0, len(groups), most)]
        return arrays

    def _submit_array(self, folder: ResultsPath, groups: Sequence[Sequence[Job]], parallel: int) -> dict[Job, str]:
        """One call of sbatch: task i of the array trains group i."""
        token = uuid.uuid4().hex[:12]
        try:
            with signals_wait(), submitting(folder, token, groups) as lock:
                try:
                    script = self._script(folder, token, groups, parallel)
                    for job in (job for group in groups for job in group):
                        (folder / ERRORS / f"{job.pack.id}.txt").unlink()
                    # sbatch holds the lock, too: where this process is killed meanwhile, the next one waits for it.
                    name = f"--job-name={name_of(folder, token)}"
                    number = _number(_sbatch("--parsable", name, str(script), pass_fds=(lock.fileno(),)))
                except (Refused, LinkRefused, OSError):
                    forget(folder, token)
                    raise
                return write_down_all(folder, groups, number)
        except OSError as error:
            reason = f"{error.filename or folder}: {error.strerror}"
            raise ConfigError(f"out={folder}: {reason}; allowed: a folder with room that can be written to") from None

    def _script(self, folder: ResultsPath, token: str, groups: Sequence[Sequence[Job]], parallel: int) -> Path:
        """Write what sbatch needs, and what each job needs."""
        place = folder / FOLDER / token
        place.make_folder()
        for number, group in enumerate(groups):
            submission = submitit.helpers.DelayedSubmission(OnNode(), group)
            submission.set_timeout(self.options["time"], self.options["requeues"])
            with (place / f"{number}.pkl").whole_file(is_synced=False) as path:
                submission.dump(path)
        text = self._text(place.path, groups[0][0].processes, len(groups), parallel)
        (place / SCRIPT).write(text.encode())
        return (place / SCRIPT).path

    def _text(self, place: Path, processes: int, tasks: int, parallel: int) -> str:
        """What sbatch is to run for an array of so many tasks, with so many processes each."""
        executor = submitit.SlurmExecutor(folder=place, max_num_timeout=self.options["requeues"])
        executor.update_parameters(**self._parameters(place, processes), array_parallelism=parallel)
        executor.parameters["map_count"] = tasks
        # Private: in public submitit writes this only where it submits, too, and we do that under a lock of ours.
        return executor._make_submission_file_text(executor._submitit_command_str, "")

    def _parameters(self, folder: Path, processes: int) -> dict[str, Any]:
        names = {"time": "time", "cpus": "cpus_per_task", "memory": "mem", "gpus": "gpus_per_node"}
        direct = ("partition", "account", "qos", "constraint", "gpus_per_task")
        parameters = {names.get(k, k): v for k, v in self.options.items() if k in (*names, *direct) and v is not None}
        parameters["cpus_per_task"] *= processes  # one task, which starts the others itself
        # Since Slurm 22.05 a step does not take this over by itself.
        cores = 'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"'
        path = python_path()  # from the folder in which it was submitted a job imports nothing
        paths = ["export PYTHONSAFEPATH=1", *([f"export PYTHONPATH={shlex.quote(path)}"] if path else [])]
        parameters["setup"] = [cores, *paths, _take_over(folder), *self.options["setup"]]
        tasks = {"ntasks": 1} if "gpus_per_task" in parameters else {}  # sbatch refuses the one without the other
        parameters["additional_parameters"] = tasks | self.options["extra"]
        parameters["signal_delay_s"] = self.options["warning"]
        parameters["stderr_to_stdout"] = True
        return parameters


def together(jobs: Sequence[Job], parallel: int, seconds: float) -> list[list[Job]]:
    """Which packs share a Slurm job: as many as take about `seconds`, but no fewer jobs than can run in parallel."""
    times = [pack_seconds(job.pack, job.run.device) for job in jobs]
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


def _take_over(folder: Path) -> str:
    """The shell lines with which a job puts what it is to run where submitit looks for it: by the job's number.

    A job that comes back from the queue finds it there already. It is a pickle, so it is read where it was written, and
    not where a link leads.
    """
    task, job = "${SLURM_ARRAY_TASK_ID}", "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
    place = shlex.quote(str(folder))
    before, after = f"{place}/{task}.pkl", f"{place}/{job}_submitted.pkl"
    return f"""for path in {shlex.quote(str(folder.parent))} {place} {before} {after}; do
  if [ -L "$path" ]; then echo "error: $path is a link; allowed: files as a sweep writes them"; exit 1; fi
done
mv {before} {after} 2>/dev/null || true"""


class Refused(ConfigError):
    """Slurm has said no, and does not have the array."""


def _sbatch(*options: str, **others: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sbatch", *options], capture_output=True, text=True, **others)


def _number(done: subprocess.CompletedProcess[str]) -> str:
    """The array's number in sbatch's answer.

    Raises Refused if Slurm refuses, and ConfigError if nobody knows; then the next command asks for it.
    """
    number = re.search(r"^\d+", done.stdout, flags=re.MULTILINE)
    if done.returncode == 0 and number:
        return number[0]
    said = _said(done)
    kind = ConfigError if re.search(r"timed out|contact|connect", said, flags=re.IGNORECASE) else Refused
    raise kind(f"hydra/launcher=slurm: {said}; allowed: options that sbatch takes here")


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"


def _warn(line: str) -> None:
    """What a sweep finds goes elsewhere."""
    complain(f"warning: {line}")


def _tell_obstacles(jobs: Iterable[Queued], since: dict[str, float], out: Path) -> None:
    """Tell once of each reason for which these jobs cannot start; `since` is when each was first seen."""
    numbers: dict[str, list[str]] = {}
    for job in jobs:
        if job.obstacle:
            numbers.setdefault(f"{job.obstacle} ({job.reason})", []).append(job.number)
    for obstacle, waiting in numbers.items():
        if time.monotonic() - since.setdefault(obstacle, time.monotonic()) > OBSTACLE_SECONDS:
            since[obstacle] = math.inf
            others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
            way_out = f"stability-harness cancel {out} takes out what waits"
            _warn(f"Slurm job {waiting[0]}{others} cannot start: {obstacle}; {way_out}")


def _follow(folder: ResultsPath, running: dict[Job, str]) -> Results:
    """Yield each pack as it ends, and None in between. Raises FolderLost."""
    left_at: dict[Job, float] = {}
    read_at: dict[Job, int | None] = {}  # thousands of packs may wait: each is read again where it was written again
    obstacles: dict[str, float] = {}
    users = submitters(folder)
    while running:
        time.sleep(POLL_SECONDS)
        yield None
        with folder.opened():  # it is still there
            queued = queue_of(folder, users)
        waited_for = ((queued or {})[number] for number in set(running.values()) & (queued or {}).keys())
        _tell_obstacles(waited_for, obstacles, folder.root)
        for job, number in list(running.items()):
            has_left, written = queued is not None and number not in queued, written_at(job.out, job.pack.id)
            ended: Finished | Failed | None = None
            if has_left or written != read_at.get(job):
                ended, read_at[job] = finished(job), written
            if ended is None and has_left:
                waited = time.monotonic() - left_at.setdefault(job, time.monotonic())
                ended = _lost(folder, job, number) if waited > LOST_SECONDS else None
            if ended is not None:
                del running[job]
                yield ended


def _lost(folder: ResultsPath, job: Job, number: str) -> Failed:
    """What is known of a job that has left the queue without finishing its pack."""
    trace = folder / ERRORS / f"{job.pack.id}.txt"
    if reason := _tail(trace, of_start=True):
        return Failed(job.pack.id, reason[0], trace.path)
    logs = (entry / f"{number}_0_log.out" for entry in (folder / FOLDER).entries() if TOKEN.fullmatch(entry.name))
    log = next((log for log in logs if log.exists()), None)
    lines = _tail(log) if log else ["(no log)"]
    last = next((line for line in reversed(lines) if line.strip()), "")
    tail = "\n".join(lines)
    sacct = ["sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={number}"]
    answer = subprocess.run(sacct, capture_output=True, text=True).stdout
    state = answer.split("\n")[0].strip() or "no longer known to Slurm"
    return record_failure(job, f"Slurm job {number} ended ({state}): {last}", f"{log}\n{tail}")


def _tail(file: ResultsPath, of_start: bool = False) -> list[str]:
    """The last lines of a file, or the first ones; none if it is not there, or no file."""
    try:
        with os.fdopen(file.descriptor(os.O_RDONLY), "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            handle.seek(0 if of_start else max(0, size - MOST_TAIL))
            lines = handle.read(MOST_TAIL).decode(errors="replace").splitlines()
    except (OSError, LinkRefused):
        return []
    return lines[:40] if of_start else lines[-40:]
