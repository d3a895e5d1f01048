"""Planning a grid of 10,000 trials, against stock Hydra composing its jobs one by one.

    python -m tests.benchmarks.planning

Prints the wall time and peak memory of `python -m sweeps plan=true`, start-up included, and the ratio of Hydra's time
for a job, measured on a few jobs in the same run, to ours.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

TRIALS, SAMPLE = 10_000, 10
AXES = ["seed=range(250)", "model.width=32,64", "optim.lr=1e-3,1e-2,3e-2,1e-1,3e-1", "mitigation=none,qk_norm"]
FAULTS = ["fault=none,weight_bit", "fault.start=50"]


def main() -> None:
    started = time.perf_counter()
    command = [sys.executable, "-m", "sweeps", "plan=true", *AXES, *FAULTS]
    plan = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    assert plan.startswith(f"{TRIALS} trials asked for"), plan

    from hydra import compose, initialize_config_dir

    from tests.sweeps.command import for_stock_hydra

    with TemporaryDirectory() as folder, initialize_config_dir(str(for_stock_hydra(Path(folder))), version_base="1.3"):
        started = time.perf_counter()
        for seed in range(SAMPLE):
            compose("config", [f"seed={seed}", "model.width=64", "optim.lr=0.01", "mitigation=qk_norm"])
        stock = (time.perf_counter() - started) / SAMPLE
    print(
        f"{TRIALS} trials planned in {seconds:.1f} s and {memory:.0f} MiB (goals 10 s, 1024 MiB); "
        f"stock Hydra composes a job in {stock * 1e3:.0f} ms: ratio {stock * TRIALS / seconds:.0f}"
    )


if __name__ == "__main__":
    main()
