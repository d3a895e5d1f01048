"""What small commands take from start to end, against a process that imports torch and does nothing.

    python -m tests.benchmarks.startup [--rounds 10]

In every round each command runs once, in turn; medians of the ratios of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

TINY = ["model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.batch=2", "train.steps=2"]
TINY += ["schedule.warmup=1", "data.source=zipf", "data.vocabulary=32", "data.length=2000", "train.validate_tokens=16"]
TINY += ["train.validate_between=16", "hydra.launcher.workers=1", "device=cpu"]
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "status": (["status", "OUT"], None),
    "verify": (["verify", "OUT"], None),
    "sweep plan=true, two trials": (["sweep", *TINY, "seed=0,1", "plan=true"], 0.7),
    "sweep, one trial of two steps": (["sweep", *TINY, "out=NEW"], 2.0),
}
"""What is typed, and the goal in seconds on a quiet machine."""


def seconds(command: list[str]) -> float:
    """Of a process from start to end."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {name: [] for name in ("import torch", *COMMANDS)}
    program = [sys.executable, "-c", "import sys; from sweeps.commands.console import run; sys.exit(run(sys.argv[1:]))"]
    with tempfile.TemporaryDirectory() as folder:
        places = {"OUT": f"{folder}/out"}
        subprocess.run([*program, "sweep", *TINY, f"out={folder}/out"], check=True, stdout=subprocess.DEVNULL)
        for number in range(rounds + 1):
            places["NEW"] = f"{folder}/{number}"
            taken = {"import torch": seconds([sys.executable, "-c", "import torch"])}
            for name, (words, _) in COMMANDS.items():
                filled = [text.replace("OUT", places["OUT"]).replace("NEW", places["NEW"]) for text in words]
                taken[name] = seconds([*program, *filled])
            if number:  # the first one reads files that are not in memory
                for name, value in taken.items():
                    found[name].append(value)
    bare = found.pop("import torch")
    print(f"python -c 'import torch': {statistics.median(bare):.2f} s")
    for name, values in found.items():
        ratios = sorted(value / base for value, base in zip(values, bare, strict=True))
        goal = f", goal {COMMANDS[name][1]} s" if COMMANDS[name][1] else ""
        print(
            f"{name}: {statistics.median(values):.2f} s{goal}; ratio {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
