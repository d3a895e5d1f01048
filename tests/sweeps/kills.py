"""Kill a sweep again and again, start it again each time, and compare what it leaves with a sweep that nobody killed.

    python -m tests.sweeps.kills [--kills 100] [--seed 0] [--folder DIR]

Each kill is a SIGKILL, at a random moment while packs train, of a random process: the command itself, or one of its
workers. tests/sweeps/test_resume.py does it with fewer kills.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from analysis import open_sweep
from harness.storage.progress_files import PROGRESS
from harness.storage.stored import read_packs
from sweeps.running.job import CHECKPOINTS, ERRORS
from sweeps.running.ledger import LOCKS
from tests.sweeps.command import REPOSITORY, differing, results

GRID = [
    *("-m", "model.width=16,32", "model.depth=1", "model.head_dim=8", "model.context=16", "pack.size=6"),
    *("data.source=zipf", "data.vocabulary=32", "data.length=2000", "schedule.warmup=2", "telemetry.block=10"),
    *(
        "train.batch=2",
        "train.validate_tokens=16",
        "train.validate_between=16",
        "checkpoint.every=7",
        "hydra.launcher.workers=2",
    ),
    *("optim.lr=1e-2,1e-1", "mitigation=none,zclip", "fault=none,weight_bit,rare_tokens"),
]  # 24 trials of a seed: 8 golden ones, and two faults of each
AT_MOST = 0.7  # seconds between the sign of life and the kill


def arguments(out: Path, steps: int, seeds: int = 2) -> list[str]:
    return [*GRID, f"seed=range({seeds})", f"train.steps={steps}", f"fault.start={steps // 2}", f"out={out}"]


def started(out: Path, steps: int) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "sweeps", *arguments(out, steps)]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True, **pipes)


def workers(parent: int) -> list[int]:
    """The processes that train for this command: the children of its fork server."""
    children = collections.defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = entry.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children[int(above)].append(int(entry.parent.name))
    return [worker for child in children[parent] for worker in children[child]]


def alive(out: Path, process: subprocess.Popen, since: float) -> bool:
    """Wait until a pack of this command has saved a checkpoint; False if it ended before."""
    while process.poll() is None:
        for file in (out / CHECKPOINTS).glob("*/*.safetensors"):
            try:
                if file.stat().st_mtime > since:
                    return True
            except OSError:
                continue  # it was just replaced
        time.sleep(0.02)
    return False


def killed_often(
    out: Path,
    kills: int,
    steps: int,
    draw: random.Random,
    at_most: float = AT_MOST,
    start: Callable[[Path, int], Any] = started,
) -> collections.Counter:
    """Run the command until it ends well, with `kills` kills before. Returns how often what was done."""
    done: collections.Counter = collections.Counter()
    while done["parent"] + done["worker"] < kills:
        since, process = time.time(), start(out, steps)
        if not alive(out, process, since):
            break
        time.sleep(draw.uniform(0, at_most))
        found = workers(process.pid)
        victim = draw.choice([process.pid, *found])
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            process.communicate()
            continue
        done["parent" if victim == process.pid else "worker"] += 1
        if victim != process.pid:
            time.sleep(draw.uniform(0, at_most))  # the command goes on without it for a while, and ends as well
            process.kill()
        process.communicate()
        done["starts"] += 1
    while True:
        process = start(out, steps)
        printed, _ = process.communicate()
        done["starts"] += 1
        if process.returncode:
            raise RuntimeError(printed)
        if "left to another process" not in printed:
            return done


def check(out: Path, whole: Path) -> None:
    """Raises AssertionError if the two stores differ in a bit, or if anything is missing, there twice, or left over."""
    found, expected = results(out), results(whole)
    assert found.complete.all() and expected.complete.all()
    assert differing(found, expected) == []
    ids = [trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"]]
    assert len(ids) == len(set(ids)) == len(open_sweep(whole).trial)
    left = [path for name in (CHECKPOINTS, ERRORS, LOCKS, PROGRESS) for path in (out / name).glob("*")]
    assert not left, left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    process = started(folder / "whole", options.steps)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    done = killed_often(folder / "killed", options.kills, options.steps, random.Random(options.seed))
    check(folder / "killed", folder / "whole")
    counts = f"{done['parent']} of the command, {done['worker']} of a worker, {done['starts']} starts"
    trials = len(open_sweep(folder / "whole").trial)
    print(f"{done['parent'] + done['worker']} kills ({counts}): {trials} trials, all bits equal")


if __name__ == "__main__":
    main()
