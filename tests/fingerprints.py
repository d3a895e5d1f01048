"""Hashes of what a set of sweeps leaves in its stores, to compare two versions of the source bit for bit.

    python -m tests.fingerprints FOLDER [NAME ...]

Trains each of `SWEEPS` into FOLDER/NAME, or all, and prints a line for each: how many trials it has, and a hash of all
that was measured of them and of all that struck them. Times, ids and configurations are left out, and trials come in
no order: so versions may name a field otherwise, or have one more, and still print the same lines. What is in
FOLDER already is not trained again. On one machine, as other machines round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from analysis import fault_events, open_sweep

REPOSITORY = Path(__file__).resolve().parents[1]
TIMES = {"tokens_per_second", "step_seconds"}
TOLD = ("outcome", "nonfinite_step", "masked_step", "acted", "idle_parts")
SMALL = ("model.width=32", "model.head_dim=16", "model.context=32", "schedule.warmup=4", "train.batch=4")
SHORT = (*SMALL, "train.validate_tokens=256", "train.validate_between=64")
KILLED = (*SHORT, "train.steps=400", "fault.start=200", "checkpoint.every=10", "seed=range(4)", "optim.lr=3e-2")
SWEEPS = {
    "quickstart": ("study=quickstart",),
    "campaign": ("study=campaign",),
    "mitigations": (
        *SHORT,
        *("train.steps=24", "mitigation=glob(*)", "optim.lr=3e-2", "fault.start=10"),
        "fault=none,weight_bit,rare_tokens,learning_rate_jump",
    ),
    "killed": (*KILLED, "mitigation=none,zclip,fp16_dynamic", "fault=none,weight_bit,rare_tokens,moment_bit"),
    "processes": (
        *SHORT,
        *("train.steps=60", "train.ranks=2", "ranks=processes", "fault.start=20", "seed=range(2)"),
        "fault=none,weight_bit,stale_gradient,activation_bit",
    ),
}
KILLS = 4


def train(out: Path, arguments: tuple[str, ...], kills: int = 0) -> None:
    """Run the command until it ends well, after it and its workers were killed so many times."""
    draw, environment = random.Random(0), os.environ | {"PYTHONPATH": str(REPOSITORY)}
    for number in range(kills + 1):
        with (out.parent / f"{out.name}.txt").open("ab") as printed:
            command = [sys.executable, "-m", "sweeps", "-m", *arguments, f"out={out}"]
            streams = {"stdout": printed, "stderr": printed}
            process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True, **streams)
            if number < kills:
                while process.poll() is None and not any((out / "checkpoints").glob("*/*.safetensors")):
                    time.sleep(0.1)
                time.sleep(draw.uniform(0, 3))
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            elif process.wait():
                raise SystemExit(f"{out.name}: ended with {process.returncode}, see {printed.name}")


def of_trials(out: Path) -> Iterator[bytes]:
    """A hash of what is stored of each trial."""
    sweep, events = open_sweep(out).load(), fault_events(out)
    strikes = {trial: own.drop(columns="trial").to_csv(index=False) for trial, own in events.groupby("trial")}
    assert sweep.complete.all()
    names = [*sorted(str(name) for name in sweep.data_vars if name not in TIMES), *TOLD]
    for number, trial in enumerate(sweep.trial.values):
        found = hashlib.sha256(strikes.get(trial, "").encode())
        for name in names:
            values = sweep[name].transpose("trial", ...).values[number]
            found.update(name.encode() + (str(values).encode() if values.dtype.kind in "UO" else values.tobytes()))
        yield found.digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*SWEEPS, []], metavar="NAME", help=", ".join(SWEEPS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or SWEEPS:
        out = (options.folder / name).resolve()
        if not (out / "store.zarr").exists():
            train(out, SWEEPS[name], KILLS if name == "killed" else 0)
        found = sorted(of_trials(out))
        print(f"{name:12} {len(found):5} trials  {hashlib.sha256(b''.join(found)).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
