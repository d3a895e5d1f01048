"""What snapshots cost: the time of a step with a playbook that goes back over one whose detectors watch alone.

    python -m tests.benchmarks.recovery [--rounds 20]

Packs with and without are trained in turn, in one process with one thread; nothing is alarmed. Taking alone is timed
within the steps that it is a share of, so what else the machine does is in both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch

from harness.config import Model, Train, Trial, sections
from harness.config.ladder import canonical
from harness.data.corpus import load_corpus
from harness.incidents.snapshots import Snapshots
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule

LADDER = canonical([{"detector": "any", "action": "roll_back", "limit": 3}])


def seconds(width: int, depth: int, size: int, steps: int, every: int | None) -> tuple[float, float]:
    """Of one trial-step, and the share of it that taking snapshots is."""
    settings = Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1)
    extras = {"detect": {"name": "finite"}}
    if every is not None:
        extras |= {"playbook": {"name": "own", "ladder": LADDER}, "playbook.snapshot": {"every": every}}
    parts = {name: sections()[name](**values) for name, values in extras.items()}
    parts |= {"model": Model(width=width, depth=depth), "train": settings}
    trials = [Trial.of(parts, seed=seed) for seed in range(size)]
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device("cpu"))
    take, spent = Snapshots.take, [0.0]

    def timed(*arguments: Any) -> None:
        begun = time.perf_counter()
        take(*arguments)
        spent[0] += time.perf_counter() - begun

    started = time.perf_counter()
    with patch.object(Snapshots, "take", timed):
        train(pack, FaultSchedule([None] * size), 50, lambda first, signals: None)
    whole = time.perf_counter() - started
    return whole / steps / size, spent[0] / whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for every in (10, 1):
        for width, depth, size, steps in ((32, 2, 8, 80), (64, 4, 8, 40), (128, 4, 8, 20)):
            ratios, shares = [], []
            for i in range(options.rounds):
                turns = (None, every) if i % 2 else (every, None)
                both = {on: seconds(width, depth, size, steps, on) for on in turns}
                ratios.append(both[every][0] / both[None][0])
                shares.append(both[every][1])
            (low, ratio, high), share = statistics.quantiles(ratios, n=4), statistics.median(shares)
            print(
                f"width {width}, depth {depth}, {size} trials, every {every} steps: step with / without = {ratio:.3f} "
                f"(half of the rounds in {low:.3f} to {high:.3f}); taking alone / step = {share:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
