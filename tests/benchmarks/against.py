"""A step of training in this working tree against one at another revision, by each one's own command, side by side.

    python -m tests.benchmarks.against REVISION [--rounds 6] [--width 32 64] [--steps 150]

Packs of eight trials in one process with one thread: both at the same time, each on a core of its own, and once more
with the cores exchanged, so what else the machine does slows both. Of each run the first quartile of its steps' times
counts, of a round the geometric mean of its two ratios, and of the rounds the median and their range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from analysis import open_sweep

ROOT = Path(__file__).resolve().parents[2]
GRID = ["study=grid", "device=cpu", "seed=range(8)", "pack.size=8", "hydra.launcher.workers=1", "telemetry.block=10"]
GRID += ["model.depth=2", "model.head_dim=16"]


def step_seconds(cores: Mapping[Path, int], width: int, steps: int) -> list[float]:
    """Seconds of a step of the pack in each of two trees, which train at the same time on these cores."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number, (tree, core) in enumerate(cores.items()):
            sizes = [f"model.width={width}", f"train.steps={steps}", f"train.validate_every={steps}"]
            command = [sys.executable, "-m", "sweeps", f"out={folder}/{number}", *GRID, *sizes]
            environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL)
            os.sched_setaffinity(process.pid, {core})
            started.append(process)
        if any(process.wait() for process in started):
            raise RuntimeError("a sweep has failed")
        outs = [Path(folder, str(number)) for number in range(len(cores))]
        return [float(np.nanquantile(open_sweep(out).step_seconds.values, 0.25)) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    one, two = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, options.revision], cwd=ROOT, check=True)
        try:
            for width in options.width:
                ratios = []
                for _ in range(options.rounds):
                    pairs = [
                        step_seconds({ROOT: here, other: there}, width, options.steps)
                        for here, there in ((one, two), (two, one))
                    ]
                    ratios.append(statistics.geometric_mean(here / there for here, there in pairs))
                print(
                    f"width {width}: a step here / at {options.revision} = {statistics.median(ratios):.3f} "
                    f"({min(ratios):.3f} to {max(ratios):.3f}, {options.rounds} rounds)",
                    flush=True,
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
