"""Whole jobs as people wait for them: the command's wall time against a compiled loop that trains the same trials.

    python -m tests.benchmarks.jobs [campaign grid mitigations] [--rounds 3]

The peer trains each trial alone, from its first step to its last, compiled by `torch.compile`, a process for each core;
it strikes, measures, validates and stores nothing. Its time is extrapolated: the steps of all trials by what it does in
a second at their shapes, each measured for a while beside the command, round by round. Starting and compiling its
processes are left out, and so is what a mitigation would cost it: it trains the plain recipe.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.storage.stored import read_packs
from tests.benchmarks.peers import HEAD_DIM, VOCABULARY, Peer, Size

SECONDS = 8.0  # that each shape is measured for in a round


@dataclass(frozen=True)
class Job:
    """What is typed after `sweep`, and how many times as fast as the peer it should be; None: no goal."""

    words: tuple[str, ...]
    wanted: float | None


JOBS = {
    "campaign": Job(("study=campaign",), 8.0),
    "grid": Job(("study=quickstart", "fault=none"), 1.5),
    "mitigations": Job(("study=mitigations", "model.width=64"), None),
}


def ours(job: Job) -> tuple[float, Counter[Size]]:
    """Wall seconds of the command, and how many steps of each shape the trials that were asked for have."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "sweeps", f"out={out}", "device=cpu", *job.words]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - started, steps_of(out)


def steps_of(out: Path) -> Counter[Size]:
    """How many steps of each shape the trials of a results folder have, each run from its first step."""
    steps: Counter[Size] = Counter()
    for pack in read_packs(out):
        for values in pack.attributes["trials"]:
            model, train = values["model"], values["train"]
            if model["head_dim"] != HEAD_DIM or values["data"]["vocabulary"] != VOCABULARY:
                raise RuntimeError(f"the peer has heads of {HEAD_DIM} and {VOCABULARY} tokens, a trial has others")
            size = Size(model["width"], model["depth"], model["context"], train["batch"])
            steps[size] += train["steps"]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for name in options.jobs or JOBS:
        measure(name, JOBS[name], options.rounds)


def measure(name: str, job: Job, rounds: int) -> None:
    """Print the ratio of a job, round by round."""
    walls, theirs, peers, steps = [], [], {}, Counter()
    for _ in range(rounds):
        seconds, steps = ours(job)
        walls.append(seconds)
        for size in steps.keys() - peers.keys():
            peers[size] = Peer("compiled_each", size)
        theirs.append(sum(count / peers[size].steps_a_second(SECONDS) for size, count in steps.items()))
    for peer in peers.values():
        peer.close()
    ratios = sorted(their / wall for wall, their in zip(walls, theirs, strict=True))
    goal = f"; goal {job.wanted}" if job.wanted else ""
    print(
        f"{name}: {sum(steps.values()):,} trial-steps in {statistics.median(walls):.1f} s, compiled loop "
        f"{statistics.median(theirs):.1f} s (extrapolated): ratio {statistics.median(ratios):.2f} "
        f"(rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}{goal})",
        flush=True,
    )


if __name__ == "__main__":
    main()
