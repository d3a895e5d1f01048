"""What each reading of `signals.*` costs: a step at which it is taken over those of the same pack at which it is not.

    python -m tests.benchmarks.signals [--rounds 4] [--steps 24] [--width 32 64 128]

Each is taken at every second step of a run, and the medians of its two kinds of steps are compared; a reading every n
steps costs an n-th of the difference. Then whole runs, in turn: the default set over none; and signals, and with them
detectors, over a loop without any, detection of what is not finite included. Times are those of the one thread on its
core, so other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import torch

from harness.config import Model, Train, Trial, sections
from harness.data.corpus import load_corpus
from harness.detectors.table import DETECTORS
from harness.loop.loop import train
from harness.readings.table import READINGS
from harness.training.pack import Pack
from harness.training.readings import cadences, refused
from harness.training.sites import FaultSchedule

SHAPES = {32: (2, 8), 64: (4, 8), 128: (4, 4)}  # width: depth, trials
NONE = dict.fromkeys(READINGS, 0)
FIRST = 3  # steps that are left out: memory is taken in them


def trials_of(width: int, steps: int, signals: Mapping[str, int] | None, detect: str) -> list[Trial]:
    depth, size = SHAPES[width]
    settings = Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1)
    parts = {"model": Model(width=width, depth=depth), "train": settings, "detect": sections()["detect"](detect)}
    parts |= {} if signals is None else {"signals": sections()["signals"](**signals)}
    return [Trial.of(parts, seed=seed) for seed in range(size)]


def step_seconds(
    width: int, steps: int, signals: Mapping[str, int] | None, detect: str = "none", telemetry: bool = True
) -> list[float]:
    """Of each step but the first, in order; no step of them is written."""
    trials = trials_of(width, steps, signals, detect)
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device("cpu"))
    ends: list[float] = []

    def done(step: int, frozen: int) -> None:
        ends.append(time.process_time())

    fault_schedule = FaultSchedule([None] * len(trials))
    train(pack, fault_schedule, steps, lambda first, values: None, done, telemetry=telemetry, detection=telemetry)
    # The last step is validated after.
    return [after - before for before, after in zip(ends[:-2], ends[1:-1], strict=True)]


def of_reading(width: int, steps: int, rounds: int, name: str) -> float:
    """The share of a step that one reading takes."""
    ratios = []
    for _ in range(rounds):
        seconds = step_seconds(width, steps, NONE | {name: 2})[FIRST:]  # of steps 1 + FIRST, 2 + FIRST, ...
        due = [x for step, x in enumerate(seconds, 1 + FIRST) if step % 2 == 0]
        others = [x for step, x in enumerate(seconds, 1 + FIRST) if step % 2]
        ratios.append(statistics.median(due) / statistics.median(others))
    return statistics.median(ratios) - 1


def compared(width: int, steps: int, rounds: int, one: tuple, other: tuple) -> str:
    """Mean step of one kind of run over that of another, as text: the median of the rounds, and their range."""
    ratios = []
    for number in range(rounds):
        pair = [one, other] if number % 2 else [other, one]
        means = {id(kind): statistics.fmean(step_seconds(width, steps, *kind)[FIRST:]) for kind in pair}
        ratios.append(means[id(one)] / means[id(other)])
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds)"


def heard_by_default() -> str:
    """Every detector that can watch a run whose signals are the default ones."""
    names = []
    for name in DETECTORS:
        parts = {"detect": sections()["detect"](name)}
        if not list(refused(Trial.of(parts))):
            names.append(name)
    return "+".join(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, nargs="+", default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    usual = cadences(Trial())
    for width in options.width:
        depth, size = SHAPES[width]
        print(f"width {width}, depth {depth}, {size} trials", flush=True)
        total = 0.0
        for name in READINGS:
            share, every = of_reading(width, options.steps, options.rounds, name), usual.get(name, 0)
            total += share / every if every else 0
            at_default = f"every {every}: {share / every:.2%}" if every else "off"
            print(f"  {name}: {share:.1%} of a step; by default {at_default}", flush=True)
        print(f"  the default set, added up: {total:.2%} of a step", flush=True)
        rest = (width, 2 * options.steps, options.rounds)
        print(f"  the default set / none: {compared(*rest, (None,), (NONE,))}", flush=True)
        bare = (NONE, "none", False)
        print(f"  all signals / a loop without any: {compared(*rest, (None,), bare)}; goal 1.05", flush=True)
        for names in ("skip_step", "combined+finite", heard_by_default()):
            print(f"  and detect={names}: {compared(*rest, (None, names), bare)}; goal 1.05", flush=True)


if __name__ == "__main__":
    main()
