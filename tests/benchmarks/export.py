"""How long an export takes: 1,000 trials of 1,000 steps with every signal of the store, into each target.

    python -m tests.benchmarks.export [mlflow tensorboard ...] [--trials 1000] [--steps 1000] [--signals loss]

Each export is a command of its own, start-up included, into a folder that is removed again. Its peer, in the same run,
is the tracker's own call for one value, or, of MLflow, for a batch of 1,000, over a few thousand values of a trial;
tables have reading the whole store as theirs. The second export finds nothing new.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from analysis.export.registry import targets
from analysis.reading.open_sweep import open_sweep
from harness.config import Trial
from harness.storage.store import SIGNALS
from tests.analysis import synthetic

GOALS = {"mlflow": 300, "tensorboard": 120}  # seconds
PACK, BLOCK, TRIED = 50, 100, 3000  # trials, steps, values


def write_store(out: Path, trials: int, steps: int) -> None:
    """Values of all signals of two layers; the held-out loss at every hundredth step."""
    rng = np.random.default_rng(0)
    every = np.where(np.arange(steps) % 100 == 99, 2.5, np.nan)
    signals: dict[str, Callable[[Trial], np.ndarray]] = {
        name: lambda trial, shape=(steps, *[2] * ("layer" in signal.dims)): rng.normal(size=shape)
        for name, signal in SIGNALS.items()
        if name != "loss"
    }
    signals |= dict.fromkeys(("validation_loss", "validation_loss_error"), lambda trial: every)
    for begin in range(0, trials, PACK):
        own = [synthetic.make_trial(seed=seed, steps=steps) for seed in range(begin, min(begin + PACK, trials))]
        synthetic.write_pack(out, own, lambda trial: rng.normal(3, 0.1, steps), signals=signals, block=BLOCK)


# --- peers: seconds of one value ---------------------------------------------------------------------------------


def mlflow_one(folder: Path, batch: int = 1) -> float:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    run = client.create_run(client.create_experiment(f"peer-{batch}", artifact_location=folder.as_uri())).info.run_id
    number = TRIED if batch > 1 else TRIED // 10
    started = time.perf_counter()
    for begin in range(0, number, batch):
        client.log_batch(run, [Metric("loss", 0.1 * step, 1, step) for step in range(begin, begin + batch)])
    return (time.perf_counter() - started) / number


def mlflow_batch(folder: Path) -> float:
    return mlflow_one(folder, 1000)


def tensorboard_one(folder: Path) -> float:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    started = time.perf_counter()
    for step in range(TRIED):
        value = Summary.Value(tag="loss", simple_value=0.1 * step)
        writer.add_event(Event(wall_time=1, step=step, summary=Summary(value=[value])))
    writer.close()
    return (time.perf_counter() - started) / TRIED


def wandb_one(folder: Path) -> float:
    import wandb

    settings = wandb.Settings(mode="offline", console="off", silent=True)
    run = wandb.init(mode="offline", dir=str(folder), project="peer", settings=settings)
    started = time.perf_counter()
    for step in range(TRIED):
        run.log({"loss": 0.1 * step}, step=step)
    run.finish()
    return (time.perf_counter() - started) / TRIED


def trackio_one(folder: Path) -> float:
    from trackio import sqlite_storage

    sqlite_storage.TRACKIO_DIR = folder
    number = TRIED // 10
    started = time.perf_counter()
    for step in range(number):
        sqlite_storage.SQLiteStorage.bulk_log("peer", "run", [{"loss": 0.1 * step}], [step])
    return (time.perf_counter() - started) / number


PEERS: Mapping[str, Mapping[str, Callable[[Path], float]]] = {
    "mlflow": {"one value a call": mlflow_one, "log_batch of 1,000": mlflow_batch},
    "tensorboard": {"one value an event, its own writer": tensorboard_one},
    "wandb": {"one value a call": wandb_one},
    "trackio": {"one value a call": trackio_one},
}


# --- what is measured --------------------------------------------------------------------------------------------


def exported(out: Path, name: str, place: Path, more: Sequence[str]) -> float:
    """Seconds of the command."""
    command = [sys.executable, "-m", "analysis", "export", str(out), "--to", name, "--into", str(place), *more]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *targets()])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--signals")
    options = parser.parse_args()
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    more = ["--signals", options.signals] if options.signals else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        write_store(out, options.trials, options.steps)
        started = time.perf_counter()
        sweep = open_sweep(out)
        names = (
            options.signals.split(",") if options.signals else [name for name in sweep if "step" in sweep[name].dims]
        )
        values = sum(int(sweep[name].notnull().sum()) for name in names)
        reading = time.perf_counter() - started
        size = f"{options.trials} trials of {options.steps} steps, {values / 1e6:.2f} million values"
        print(f"{size}; reading the store: {reading:.1f} s")
        for name in options.names or targets():
            place, beside = Path(folder) / name, Path(folder) / f"{name}-peer"
            beside.mkdir()
            peers = {what: peer(beside) * values for what, peer in PEERS.get(name, {}).items()}
            first, second = (exported(out, name, place, more) for _ in range(2))
            size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            goal = f" (goal {GOALS[name]} s)" if name in GOALS else ""
            print(f"{name}: {first:.1f} s{goal}, {size / values:.1f} bytes a value; again {second:.1f} s")
            for what, seconds in (peers or {"reading the store": reading}).items():
                print(f"  export / {what} = {first / seconds:.2g}", flush=True)
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
