"""What telemetry and the detection of non-finite trials cost: the time of a step with all signals over one with none.

    python -m tests.benchmarks.telemetry [--rounds 10]

The detection of non-finite trials is left out with the signals. Packs with and without are trained in turn, in one
process with one thread, and each for twice the steps between two readings of the rarest kind: what is read once in ten
or twenty steps is read so often here, too, and not in one of six. A process reads a corpus once for all its packs, and
counts the tokens once (65 ms for 28 million); both are done before.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from harness.config import Model, Train, Trial
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from sweeps.running.job import corpus_of

STEPS = 40


def seconds(width: int, depth: int, size: int, steps: int, telemetry: bool, device: str) -> float:
    """Of one trial-step."""
    settings = Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1)
    trials = [Trial(model=Model(width=width, depth=depth), train=settings, seed=seed) for seed in range(size)]
    corpus = corpus_of(trials[0].data, trials[0].model.context)
    _ = corpus.counts  # they are kept with it
    pack = Pack(trials, corpus, torch.device(device))
    started = time.perf_counter()
    train(pack, FaultSchedule([None] * size), 50, lambda first, signals: None, telemetry=telemetry, detection=telemetry)
    return (time.perf_counter() - started) / steps / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width, depth, size in ((32, 2, 8), (64, 4, 8), (128, 4, 8)):
        ratios = []
        for i in range(options.rounds):
            both = {on: seconds(width, depth, size, STEPS, on, options.device) for on in (i % 2 == 0, i % 2 != 0)}
            ratios.append(both[True] / both[False])
        # The two of a round follow each other, so slow changes of the machine's speed fall out of their ratio.
        low, ratio, high = statistics.quantiles(ratios, n=4)
        print(
            f"width {width}, depth {depth}, {size} trials: step with telemetry / without = {ratio:.3f} "
            f"(half of the rounds in {low:.3f} to {high:.3f}; goal 1.05)",
            flush=True,
        )


if __name__ == "__main__":
    main()
