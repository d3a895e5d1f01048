"""What Slurm's queue says of the jobs of a results folder.

A job is a folder's if Slurm says so, whatever stands in the files of that folder, which may be a stranger's: its name
has the folder's id and its script stands in this folder. Its number alone says nothing, for Slurm gives it out again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.config import ConfigError
from harness.storage.results_folder import MARKER, ResultsPath

FOLDER, SCRIPT = "slurm", "submission.sh"
TOKEN = re.compile(r"[0-9a-f]{12}")
NUMBER = re.compile(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?")
MOST_NUMBERS = 1000  # in one question
_FORMAT = "%i|%U|%T|%r|%j|%o"  # the script's path last, for it may have any sign in it
_LINE = re.compile(r"([0-9_]+)\|([0-9]+)\|([A-Z_]+)\|([^|]*)\|(.*?)\|(.*)")
_GIVEN_NODE = "ReqNodeNotAvail, UnavailableNodes"
_NEVER = {
    "BadConstraints": "no node has what it asks for",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "PartitionNodeLimit": "its partition has too few nodes for it, or they are down",
    "PartitionConfig": "no node of its partition has what it asks for",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "DependencyNeverSatisfied": "a job that it depends on has failed",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its qos is not valid",
    "JobHeldUser": "it is held; scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "it came back too often",
    "AssociationTimeLimit": "the time of its account is used up",
    "QOSTimeLimit": "the time of its qos is used up",
    "NodeDown": "a node that it needs is down",
    "FrontEndDown": "the node that would start it is down",
    "launch failed requeued held": "it could not be launched, and is held",
    "job requeued in held state": "it came back held; scontrol release lets it go",
    _GIVEN_NODE: "the nodes that it could have are down or drained",
}
_LIMIT_OF_A_JOB = re.compile(r"(QOS|Assoc)(Max\w*(PerJob|PerNode)\w*|Min\w+)")  # others hold until earlier jobs end


@dataclass(frozen=True)
class Queued:
    """A job, or a task of an array, that has not left the queue."""

    number: str  # as `12_3`
    user: int
    state: str  # as `PENDING`
    reason: str  # why it is pending, by Slurm's word
    name: str
    script: Path

    @property
    def out(self) -> Path:
        """The results folder that it was submitted for, if it is a sweep's."""
        return self.script.parent.parent.parent

    @property
    def obstacle(self) -> str:
        """Why it cannot start as things are, in words; empty if it can, sooner or later."""
        if self.state != "PENDING":
            return ""
        reason = _GIVEN_NODE if self.reason.startswith(_GIVEN_NODE) else self.reason
        if _LIMIT_OF_A_JOB.fullmatch(reason):
            return "it asks for more than its qos or account allows a job"
        return _NEVER.get(reason, "")

    @property
    def description(self) -> str:
        """Its state, and why it is pending."""
        if self.obstacle:
            return f"{self.state.lower()}, cannot start: {self.obstacle} ({self.reason})"
        return f"{self.state.lower()} ({self.reason})" if self.state == "PENDING" else self.state.lower()


def name_of(folder: ResultsPath, token: str) -> str:
    """What an array that is submitted for this folder is called in Slurm."""
    return f"sweep-{folder.id}-{token}"


def queue_of(folder: ResultsPath, users: Iterable[int]) -> dict[str, Queued] | None:
    """The jobs of this folder that these users have in the queue, by number; None if Slurm does not answer just now."""
    jobs = _with_its_name(folder, users)
    return None if jobs is None else {job.number: job for job in jobs if _is_here(job, folder)}


def ours_and_others(out: Path) -> tuple[list[Queued], list[Queued]]:
    """The jobs of `out` that are this user's, and those with its id that are not to be touched.

    Those are another user's, or were submitted for a folder of which this one is a copy, or where this one was earlier.
    """
    if not (out / MARKER).exists():
        return [], []
    folder = ResultsPath.open(out)
    jobs = _with_its_name(folder, submitters(folder)) or []
    ours = [job for job in jobs if job.user == os.getuid() and _is_here(job, folder)]
    return ours, [job for job in jobs if job not in ours]


def scancel(jobs: Iterable[Queued]) -> str:
    """Take this user's jobs out of the queue. Returns what Slurm says against it, or nothing."""
    arrays = sorted({job.number.split("_")[0] for job in jobs}, key=int)
    done = _asked("scancel", f"--user={os.getuid()}", *arrays)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def _with_its_name(folder: ResultsPath, users: Iterable[int]) -> list[Queued] | None:
    jobs = _squeue(f"--user={','.join(map(str, sorted(users)))}")
    pattern = re.compile(name_of(folder, TOKEN.pattern))
    return None if jobs is None else [job for job in jobs if pattern.fullmatch(job.name)]


def with_numbers(numbers: Iterable[str]) -> list[Queued]:
    """Whatever has these numbers in the queue, anyone's; nothing if Slurm does not answer. To name them, not to act."""
    arrays = sorted({number.split("_")[0] for number in numbers}, key=int)
    jobs: list[Queued] = []
    for start in range(0, len(arrays), MOST_NUMBERS):
        jobs += _squeue(f"--jobs={','.join(arrays[start : start + MOST_NUMBERS])}") or ()
    return jobs


def submitters(folder: ResultsPath) -> set[int]:
    """The users who may have jobs for this folder: this one, its owner, and whoever has submitted from it."""
    with folder.opened() as at:
        owners = {os.fstat(at).st_uid}
    with contextlib.suppress(ConfigError):  # a link in its place: then nobody has submitted from it
        tokens = [entry for entry in (folder / FOLDER).entries() if TOKEN.fullmatch(entry.name)]
        owners.update(status.st_uid for status in (token.status() for token in tokens) if status)
    return {os.getuid(), *(user for user in owners if user_name(user))}


def user_name(number: int) -> str:
    """Empty for a number that no user has here, of which squeue would complain."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return ""


def _is_here(job: Queued, folder: ResultsPath) -> bool:
    token = job.script.parent
    if (job.script.name, token.parent.name, name_of(folder, token.name)) != (SCRIPT, FOLDER, job.name):
        return False
    try:
        status = os.stat(job.out)
    except (OSError, ValueError):
        return False
    return (status.st_dev, status.st_ino) == folder.inode


def _squeue(choice: str) -> list[Queued] | None:
    """The chosen jobs that are pending or running; None if Slurm does not answer just now.

    From squeue, which is exact: sacct hears of a job seconds later, and of some cancelled array tasks never.
    """
    try:
        answer = _asked("squeue", "--noheader", "--all", "--array", f"--format={_FORMAT}", choice)
    except OSError:
        return None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    lines = [match.groups() for line in answer.stdout.splitlines() if (match := _LINE.fullmatch(line))]
    return [Queued(job, int(user), state, why, name, Path(script)) for job, user, state, why, name, script in lines]


def _asked(command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Without the user's own defaults, which could hide jobs, that would then be submitted again, or ask questions."""
    settings = f"{command.upper()}_"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    return subprocess.run(
        [command, *options], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
