"""What a Slurm job runs.

A job that is told that its time is nearly over, or that another one needs its place, saves a checkpoint after the step
that is under way, and goes back into the queue; from there it goes on where it was. So does one whose node was lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import submitit

from harness.storage.checkpoint import Checkpoints, Stopped
from harness.storage.results_folder import FolderLost
from sweeps.running.job import Elsewhere, Failed, Job, train_pack_safely
from sweeps.running.local import available_cores


class OnNode:
    """Trains some packs, one after the other, on the cores that Slurm gave the job."""

    def __init__(self) -> None:
        self._asked: int | None = None  # the signal that has come
        self._checkpoints: Checkpoints | None = None  # of the pack in training

    def __call__(self, jobs: Sequence[Job]) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", available_cores())))
        warning = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
        requeue = signal.getsignal(warning)  # by submitit, with what `checkpoint` returns; ends the process
        for number in (warning, signal.SIGTERM):
            signal.signal(number, self._stop)
        failed = []
        for job in jobs:
            try:
                self._checkpoints = job.checkpoints
                self._checkpoints.is_stopping = self._asked is not None
                result = train_pack_safely(job, self._checkpoints)
            except Stopped:
                if self._asked == warning and callable(requeue):
                    requeue(warning, None)
                sys.exit(f"stopped by {signal.Signals(self._asked or 0).name}; a checkpoint is saved")
            except FolderLost as error:
                sys.exit(f"error: {error}")  # submitit would print the trace of an exception, and look for the folder
            if isinstance(result, Elsewhere):
                failed.append(f"pack {job.pack.id} is being trained by another process")
            elif isinstance(result, Failed):
                failed.append(result.message)
        if failed:
            raise RuntimeError("\n".join(failed))  # so that Slurm calls the job failed, too

    def checkpoint(self, jobs: Sequence[Job]) -> submitit.helpers.DelayedSubmission:
        """What submitit is to run when the job comes back from the queue."""
        return submitit.helpers.DelayedSubmission(OnNode(), jobs)

    def _stop(self, number: int, frame: object) -> None:
        self._asked = number
        if self._checkpoints:
            self._checkpoints.is_stopping = True
