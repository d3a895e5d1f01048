"""Whole jobs as people wait for them: the command's wall time against a compiled loop that trains the same trials.

    python -m tests.benchmarks.jobs [campaign grid mitigations] [--rounds 3] [--keep DIR]

The peer trains each trial alone, from its first step to its last, compiled by `torch.compile`, a process for each core;
it strikes, measures, validates and stores nothing. Its time is extrapolated: the steps of all trials by what it does in
a second at their shapes, each measured for a while beside the command, round by round. Starting and compiling its
processes are left out, and so is what a mitigation would cost it: it trains the plain recipe.

`mitigations` takes half an hour, so a round is a part of it: with ten rounds each has a tenth of the mitigations. What
the rounds trained is left in DIR, to be merged.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from harness.storage.stored import read_packs
from tests.benchmarks.peers import HEAD_DIM, VOCABULARY, Peer, Size
from tests.sweeps.command import FOLDER, general_mitigations

SECONDS = 8.0  # that each shape is measured for in a round


@dataclass(frozen=True)
class Job:
    """What is typed after `sweep`, and how many times as fast as the peer it should be; None: no goal."""

    words: tuple[str, ...]
    wanted: float | None
    is_cut: bool = False  # each round has a part of the mitigations; else a round is the whole job

    def rounds(self, count: int) -> list[tuple[str, ...]]:
        """What is typed in each round."""
        if not self.is_cut:
            return [self.words] * count
        names = mitigations()
        return [(*self.words, f"mitigation={','.join(names[number::count])}") for number in range(count)]


def mitigations() -> list[str]:
    """Those of `study=mitigations`."""
    study = yaml.safe_load((FOLDER / "study" / "mitigations.yaml").read_text(encoding="utf-8"))
    (excluded,) = re.findall(r"exclude=\[(.*)\]", study["hydra"]["sweeper"]["params"]["mitigation"])
    return [name for name in ("none", *general_mitigations()) if name not in excluded.split(",")]


JOBS = {
    "campaign": Job(("study=campaign",), 8.0),
    "grid": Job(("study=quickstart", "fault=none"), 1.5),
    "mitigations": Job(("study=mitigations", "model.width=64"), None, is_cut=True),
}


def ours(words: Sequence[str], kept: Path | None) -> tuple[float, Counter[Size]]:
    """Wall seconds of the command, and how many steps of each shape the trials that were asked for have."""
    with tempfile.TemporaryDirectory() as folder:
        out = kept or Path(folder) / "out"
        if out.exists():
            raise SystemExit(f"{out}: is there already, so that nothing would be trained")
        command = [sys.executable, "-m", "sweeps", f"out={out}", "device=cpu", *words]
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
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args()
    for name in options.jobs or JOBS:
        measure(name, JOBS[name], options.rounds, options.keep)


def measure(name: str, job: Job, rounds: int, keep: Path | None) -> None:
    """Print the ratio of a job, round by round; what was trained is left in folders inside of `keep`."""
    walls, theirs, peers, done = [], [], {}, 0
    for number, words in enumerate(job.rounds(rounds)):
        seconds, steps = ours(words, keep and keep / f"{name}-{number}")
        walls.append(seconds)
        done = sum(steps.values()) + done * job.is_cut
        for size in steps.keys() - peers.keys():
            peers[size] = Peer("compiled_each", size)
        theirs.append(sum(count / peers[size].steps_a_second(SECONDS) for size, count in steps.items()))
    for peer in peers.values():
        peer.close()
    ratios = sorted(their / wall for wall, their in zip(walls, theirs, strict=True))
    goal = f"; goal {job.wanted}" if job.wanted else ""
    whole = sum if job.is_cut else statistics.median
    print(
        f"{name}: {done:,} trial-steps in {whole(walls):.1f} s, compiled loop "
        f"{whole(theirs):.1f} s (extrapolated): ratio {statistics.median(ratios):.2f} "
        f"(rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}{goal})",
        flush=True,
    )


if __name__ == "__main__":
    main()
