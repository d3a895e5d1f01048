"""Ten thousand tiny trials: how long they take to plan, to open, to sum up and to report, and how that grows.

    python -m tests.benchmarks.scale                            # 1,000 and 10,000 trials, in a temporary folder
    python -m tests.benchmarks.scale --out DIR --trials 10000   # makes the synthetic store, and measures nothing

The store is written through the store's own writer, pack by pack as the planner has them, for a grid of widths, rates,
mitigations, faults and seeds; its curves come from a formula. Each step is a process of its own, start-up included,
but `open_sweep`, which is timed alone. Memory is the largest resident set of the process. Files are read from the page
cache, since they were written just before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the process that measures has to stay small: its own size would count as that of its children
    import numpy as np

    from harness.config import Trial

SIZES = (1_000, 10_000)
STEPS, BLOCK = 100, 50
AXES = ["model.width=16,32,64,128", "optim.lr=1e-3,1e-2,3e-2,1e-1,3e-1", "mitigation=none,qk_norm,z_loss,clip_1,lion"]
FAULTS = ["fault=none,last_bit,weight_bit,gradient_bit,learning_rate_jump", "fault.start=50"]
SHAPE = ["model.depth=2", "model.context=32", "train.batch=4", f"train.steps={STEPS}", f"train.validate_every={STEPS}"]
GRID = 500  # trials of each seed
GROWTH = 12.0  # at most, for ten times as many trials
CORPUS = {"source": "synthetic", "fingerprint": "c0ffee", "tokens": 1000}
ENVIRONMENT = {"torch": "synthetic", "device": "cpu", "threads": 1}


def grid(trials: int) -> list[str]:
    """The arguments of `python -m sweeps` for this number of trials, a multiple of 500."""
    return [*AXES, *FAULTS, *SHAPE, f"seed=range({trials // GRID})"]


# --- a synthetic store -------------------------------------------------------------------------------------------


def write_store(out: Path, overrides: Sequence[str]) -> None:
    """A finished sweep of the grid of these arguments in `out`, as `python -m sweeps` leaves it.

    Raises ConfigError if `out` has results.
    """
    from harness.objectives.outcome import judge
    from harness.storage.progress_files import write_plan
    from harness.storage.store import PackStore, open_store
    from sweeps.planning.planner import make_plan

    planned = planned_trials(overrides)
    folder = open_store(out, "scale")
    for pack in make_plan(planned, (), None, "cpu", 2).packs:
        own = pack.recorded
        depth = own[0].model.depth
        store = PackStore.create(folder, pack.id, own, STEPS, depth, CORPUS, ENVIRONMENT, BLOCK)
        signals, lost = curves(own)
        for first in range(0, STEPS, store.block):
            store.write(first, {name: values[:, first : first + store.block] for name, values in signals.items()})
        events = [fault_events(trial) for trial in own]
        store.write_ends(ends(signals["validation_loss"][:, -1:], store.shape("final_segment_loss")))
        store.finish(
            outcome=[judge(loss, step) for loss, step in zip(signals["loss"], lost, strict=True)],
            nonfinite_step=lost,
            masked_step=[None] * len(own),
            faults=events,
            strikes=[len(some) for some in events],
            changes=[len(some) for some in events],
        )
    write_plan(folder, {twin.id for trial in planned for twin in (trial, trial.golden)})


def planned_trials(overrides: Sequence[str]) -> list[Trial]:
    """The trials that `python -m sweeps` makes of these arguments."""
    from sweeps.compose.arguments import config_loader, expand
    from sweeps.compose.grid import Composer

    loader = config_loader()
    keys = frozenset(text.partition("=")[0] for text in overrides)
    return Composer(loader, "grid", keys).trials(expand({}, overrides, loader))


def curves(trials: Sequence[Trial]) -> tuple[dict[str, np.ndarray], list[int | None]]:
    """Every signal of these trials [R, steps(, layers)], and the first non-finite step of each."""
    import numpy as np

    from harness.storage.store import SIGNALS

    loss = np.array([loss_curve(trial) for trial in trials], "f4")
    is_lost = ~np.isfinite(loss)
    signals = {}
    for name, signal in SIGNALS.items():
        values = np.geomspace(2, 1, STEPS)[:, None] * np.linspace(1, 1.5, trials[0].model.depth)
        values = values if "layer" in signal.dims else values[:, 0]
        signals[name] = np.repeat(values[None].astype("f4"), len(trials), axis=0)
        signals[name][is_lost] = np.nan
    signals["loss"] = loss
    signals["grad_norm"] = signals["grad_norm"] * (1 + np.abs(np.gradient(np.nan_to_num(loss), axis=1)))
    signals["validation_loss"] = np.full_like(loss, np.nan)
    signals["validation_loss"][:, -1] = loss[:, -5:].mean(axis=1)
    return signals, [int(row.argmax()) if row.any() else None for row in is_lost]


def ends(final: np.ndarray, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """What is measured once, [R, segments], around the final validation loss [R, 1]."""
    import numpy as np

    of_text = np.random.default_rng(0).normal(0, 0.1, shape[1])
    return {"initial_segment_loss": np.full(shape, 5.5) + of_text, "final_segment_loss": final + of_text}


def loss_curve(trial: Trial) -> np.ndarray:
    """Nat/token [steps]: noise by seed, divergence and NaN at high rates, and after a strike a bump or a drift."""
    import numpy as np

    steps = np.arange(STEPS)
    kind = zlib.crc32(trial.mitigation.encode())
    noise = np.random.default_rng([trial.seed, trial.model.width, kind])
    rate, strength = np.log10(trial.optim.lr / 1e-2), np.random.default_rng(kind).random()
    is_plain = trial.mitigation in ("none", "lion")
    final = 2.6 - 0.1 * np.log2(trial.model.width / 16) + (0.1 + 0.2 * strength) * rate**2 + noise.normal(0, 0.03)
    final += (0.7 if is_plain else 0.3 * strength) * max(0.0, rate)
    loss = final + (5.5 - final) * np.exp(-steps / 20) + noise.normal(0, 0.04, STEPS)
    if trial.fault.name == "last_bit":
        drift = np.random.default_rng([trial.seed, trial.model.width, int(100 * rate) + 1000])
        loss += np.where(steps > trial.fault.start, drift.normal(0, 1e-5, STEPS), 0)
    elif trial.fault.name != "none":
        height = {"weight_bit": 2.0, "gradient_bit": 0.02, "learning_rate_jump": 0.5}[trial.fault.name]
        after = np.clip(steps - trial.fault.start, 0, None)
        height *= (1 + trial.seed % 3) * (1 if is_plain else strength)
        loss += np.where(after > 0, height * np.exp(-after / (4 + 10 * noise.random())), 0)
    if is_plain and rate > 1 and trial.seed % 3 == 0:
        loss[60:] = np.nan
    if trial.fault.name == "weight_bit" and trial.seed % 4 == 3:
        loss[trial.fault.start + 3 :] = np.nan
    return loss


def fault_events(trial: Trial) -> list[dict[str, Any]]:
    """What the fault of a trial did, as the store keeps it."""
    from harness.training.sites import Event, Site

    site = {"learning_rate_jump": Site.LEARNING_RATE, "gradient_bit": Site.REDUCED_GRADIENT}
    if trial.fault.name == "none":
        return []
    event = Event(
        site=site.get(trial.fault.name, Site.WEIGHT).value,
        tensor="" if trial.fault.name == "learning_rate_jump" else f"blocks.{trial.seed % 2}.attention.query",
        index=(trial.seed, 3),
        bit=None if trial.fault.name == "learning_rate_jump" else 30,
        step=trial.fault.start,
        before="0.1",
        after="inf",
        bits_before="3dcccccd",
        bits_after="7dcccccd",
        changed=True,
    )
    return [event.to_dict()]


# --- measuring ---------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What one step took: seconds, those of processors, MiB, and MiB beyond its imports where that is known."""

    seconds: float
    processor: float
    memory: float
    beyond: float | None = None


def command(*arguments: str) -> Cost:
    """A module of this project in a fresh process, start-up included."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return Cost(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**10)


def opening(out: Path, times: int) -> Cost:
    """`open_sweep` alone, for the first or second time in a process. The first loads torch, for the trials' schema."""
    lines = subprocess.check_output([sys.executable, "-m", __spec__.name, "--opened", str(out)], text=True).splitlines()
    return Cost(*map(float, lines[times - 1].split()))


def open_and_print(out: Path) -> None:
    """For `opening`: a line for the first time, and one for the second; what `Cost` has, memory since the imports."""
    from analysis import open_sweep

    before = peak_mib()
    for _ in range(2):
        started, processor = time.perf_counter(), time.process_time()
        sweep = open_sweep(out)
        seconds = time.perf_counter() - started
        assert sweep.sizes["trial"] >= GRID
        print(seconds, time.process_time() - processor, peak_mib(), peak_mib() - before)


def peak_mib() -> float:
    """Of this process since it began; unlike that of getrusage, without what its parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


STEPS_OF_WORK: dict[str, tuple[Callable[[Path, int], Cost], str]] = {
    "make the store": (lambda out, n: command(__spec__.name, "--out", str(out), "--trials", str(n)), ""),
    "plan": (lambda out, n: command("sweeps", "plan=true", *grid(n)), "10 s, 1024 MiB"),
    "open_sweep": (lambda out, n: opening(out, 1), "5 s, 1024 MiB"),
    "open_sweep, once more": (lambda out, n: opening(out, 2), ""),
    "python -m sweeps status": (lambda out, n: command("sweeps", "status", str(out)), "60 s with the report"),
    "python -m analysis report": (lambda out, n: command("analysis", "report", str(out)), "60 s"),
    "python -m analysis campaign": (lambda out, n: command("analysis", "campaign", str(out)), ""),
}


def measure(folder: Path, rounds: int) -> None:
    """Print what each step took at both sizes, medians of the rounds, and by how much it grew."""
    print(f"{'step':28s} {'1,000 trials':>36s} {'10,000 trials':>36s}  growth (goal {GROWTH:g}x)  goal")
    for name, (work, goal) in STEPS_OF_WORK.items():
        few, many = (
            [work(folder / f"{size}", size) for _ in range(1 if name == "make the store" else rounds)] for size in SIZES
        )
        shown, growth = map(in_words, (few, many)), median(many, "seconds") / median(few, "seconds")
        words = f"{growth:.1f}x (CPU {median(many, 'processor') / median(few, 'processor'):.1f}x)"
        print(f"{name:28s} {next(shown):>36s} {next(shown):>36s}  {words:18s}  {goal}", flush=True)


def median(costs: Sequence[Cost], what: str) -> float:
    return statistics.median(getattr(cost, what) for cost in costs)


def in_words(costs: Sequence[Cost]) -> str:
    """Such as `3.1 s (2.9 s CPU), 410 (+200) MiB`."""
    beyond = max(costs, key=lambda cost: cost.memory).beyond
    more = "" if beyond is None else f" (+{beyond:.0f})"
    memory = max(cost.memory for cost in costs)
    return f"{median(costs, 'seconds'):.2f} s ({median(costs, 'processor'):.2f} s CPU), {memory:.0f}{more} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="make the store in this folder, and measure nothing")
    parser.add_argument("--trials", type=int, default=SIZES[-1], help="of that store: a multiple of 500")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--opened", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trials < GRID or options.trials % GRID:
        parser.error(f"--trials {options.trials}: allowed: a multiple of {GRID}")
    if options.opened:
        open_and_print(options.opened)
    elif options.out:
        write_store(options.out, grid(options.trials))
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), options.rounds)


if __name__ == "__main__":
    main()
