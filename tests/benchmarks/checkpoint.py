"""What checkpoints cost: the time of a run that saves them over that of one that does not.

    python -m tests.benchmarks.checkpoint [--rounds 15] [--minutes 5]

Packs that save once and packs that do not are trained in turn, a few steps each, in one process with one thread. What a
save takes, beside the steps that fit between two of them, is the cost at the default cadence.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from harness.config import Model, Train, Trial
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from sweeps.compose.settings import CheckpointSettings


def seconds(trials: list[Trial], checkpoints: Checkpoints | None, device: str) -> float:
    """Of all steps of a pack."""
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device(device))
    started = time.perf_counter()
    train(pack, FaultSchedule([None] * len(trials)), 50, lambda first, signals: None, checkpoints=checkpoints)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=CheckpointSettings().minutes)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for width, depth, size, steps in ((32, 2, 8, 40), (64, 4, 8, 12), (256, 4, 8, 4)):
        settings = Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1)
        trials = [Trial(model=Model(width=width, depth=depth), train=settings, seed=seed) for seed in range(size)]
        extra = []
        with tempfile.TemporaryDirectory() as folder:
            for i in range(options.rounds):
                saving = Checkpoints(ResultsPath.at(Path(folder)) / str(i), every=steps // 2 + 1)
                both = {on: seconds(trials, saving if on else None, options.device) for on in (i % 2 == 0, i % 2 != 0)}
                extra.append(both[True] - both[False])
        # Within the minutes between two saves as much is trained as otherwise: a save comes on top.
        low, cost, high = (1 + one / (60 * options.minutes) for one in statistics.quantiles(extra, n=4))
        print(
            f"width {width}, depth {depth}, {size} trials: a save takes {statistics.median(extra):.3f} s; run that "
            f"saves every {options.minutes:g} minutes / one that does not = {cost:.4f} "
            f"(half of the rounds in {low:.4f} to {high:.4f}; goal 1.02)",
            flush=True,
        )


if __name__ == "__main__":
    main()
