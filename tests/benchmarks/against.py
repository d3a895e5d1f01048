"""A step of training in this working tree against one at another revision, by each one's own command, alternately.

    python -m tests.benchmarks.against REVISION [--rounds 7] [--width 32 64]

Packs of eight trials in one process with one thread. Of each run the tenth percentile of its steps' times counts, which
says least of what else the machine does; of the rounds the median, and their quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from analysis import open_sweep

ROOT = Path(__file__).resolve().parents[2]
GRID = ["study=grid", "device=cpu", "seed=range(8)", "pack.size=8", "hydra.launcher.workers=1", "telemetry.block=10"]
GRID += ["model.depth=2", "model.head_dim=16", "train.steps=200", "train.validate_every=200"]


def step_seconds(tree: Path, width: int) -> float:
    """Seconds of a step of the pack, by the command of this tree."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "sweeps", f"out={out}", *GRID, f"model.width={width}"]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        return float(np.nanquantile(open_sweep(out).step_seconds.values, 0.1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, options.revision], cwd=ROOT, check=True)
        try:
            for width in options.width:
                pairs = [(step_seconds(ROOT, width), step_seconds(other, width)) for _ in range(options.rounds)]
                ratios = [here / there for here, there in pairs]
                low, middle, high = statistics.quantiles(ratios, n=4)
                here, there = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
                print(
                    f"width {width}: a step {here:.2f} ms here, {there:.2f} ms at {options.revision}: "
                    f"ratio {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {options.rounds} rounds)"
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
