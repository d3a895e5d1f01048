"""Which pack size is fastest, and how close the planner's rule comes: the time of a trial-step for each R tried.

    python -m tests.benchmarks.pack_size [--repeats 3]

As many workers as cores measure side by side, as in a sweep, one thread each; sizes are interleaved, and each repeat
visits all of them. The smallest time is the one that the machine's other work disturbed least. Prints, for each shape,
the time at the rule's R over the best time; the rule promises 1.15.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch

from harness.config import Model, Train, Trial
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.pack_sizes import rows_at_once
from harness.training.sites import FaultSchedule
from sweeps.running.local import available_cores

SHAPES = [(16, 2, 64, 8), (32, 2, 64, 8), (64, 4, 64, 8), (96, 2, 128, 4), (128, 4, 64, 8), (256, 4, 64, 8)]
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def seconds_of_trial_step(shape: tuple[int, int, int, int], size: int, device: str) -> float:
    """One pack of `size` trials for about two seconds."""
    width, depth, context, batch = shape
    steps = max(4, min(40, int(2e11 / (6 * 12 * depth * width**2 * context * batch * size + 1e9 * size))))
    model = Model(width=width, depth=depth, context=context)
    trials = [
        Trial(
            model=model,
            train=Train(steps=steps, batch=batch, validate_every=10**6, validate_tokens=1, validate_between=1),
            seed=i,
        )
        for i in range(size)
    ]
    pack = Pack(trials, load_corpus(trials[0].data, context), torch.device(device))
    fault_schedule = FaultSchedule([None] * size)
    started = time.perf_counter()
    train(pack, fault_schedule, 50, lambda first, signals: None)
    return (time.perf_counter() - started) / steps / size


def measure(arguments: tuple[int, str]) -> dict[tuple, list[float]]:
    """All shapes and sizes, `repeats` times, in one single-threaded worker."""
    repeats, device = arguments
    torch.set_num_threads(1)
    found: dict[tuple, list[float]] = {}
    for _ in range(repeats):
        for shape in SHAPES:
            for size in SIZES:
                found.setdefault((shape, size), []).append(seconds_of_trial_step(shape, size, device))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    workers = available_cores() if options.device == "cpu" else 1
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.map(measure, [(options.repeats, options.device)] * workers)
    for shape in SHAPES:
        width, depth, context, batch = shape
        times = {size: min(t for found in results for t in found[shape, size]) for size in SIZES}
        best = min(times, key=lambda size: times[size])
        rule = rows_at_once(Model(width=width, depth=depth, context=context), batch, torch.device(options.device))
        nearest = min(SIZES, key=lambda size: abs(size - rule))
        table = "  ".join(f"{size}: {seconds * 1e3:.2f}" for size, seconds in times.items())
        print(f"width {width}, depth {depth}, {batch} x {context} tokens, ms by R:  {table}")
        print(
            f"    best R {best}, rule R {rule}: time at the rule / best = {times[nearest] / times[best]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
