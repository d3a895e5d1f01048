"""What a Slurm job runs.

A job that is told that its time is nearly over, or that another one needs its place, saves a checkpoint after the step
that is under way, and goes back into the queue; from there it goes on where it was. So does one whose node was lost.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import submitit
import torch

from harness.storage.results_folder import FolderLost
from sweeps.running.job import Elsewhere, Failed, Job
from sweeps.running.local import available_cores, train_until_asked


class OnNode:
    """Trains some packs, one after the other, on the cores that Slurm gave the job."""

    def __call__(self, jobs: Sequence[Job]) -> None:
        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", available_cores())))
        warning = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]
        requeue = signal.getsignal(warning)  # by submitit, with what `checkpoint` returns; ends the process
        asked = SimpleNamespace(value=0)  # the signal that has come
        for number in (warning, signal.SIGTERM):
            signal.signal(number, lambda number, frame: setattr(asked, "value", number))
        failed = []
        for job in jobs:
            try:
                result = train_until_asked(job, asked)
            except FolderLost as error:
                sys.exit(f"error: {error}")  # submitit would print the trace of an exception, and look for the folder
            if result is None:
                if asked.value == warning and callable(requeue):
                    requeue(warning, None)
                sys.exit(f"stopped by {signal.Signals(asked.value).name}; a checkpoint is saved")
            if isinstance(result, Elsewhere):
                failed.append(f"pack {job.pack.id} is being trained by another process")
            elif isinstance(result, Failed):
                failed.append(result.message)
        # Python puts back what a signal does by default before it ends, and the job would be called failed.
        signal.signal(warning, signal.SIG_IGN)
        if failed:
            raise RuntimeError("\n".join(failed))  # so that Slurm calls the job failed, too

    def checkpoint(self, jobs: Sequence[Job]) -> submitit.helpers.DelayedSubmission:
        """What submitit is to run when the job comes back from the queue."""
        return submitit.helpers.DelayedSubmission(OnNode(), jobs)
