"""What a detector costs: the processor time of a step that it watches over one that nothing watches.

    python -m tests.benchmarks.detection [combined ...] [--rounds 15]

Both have all telemetry. Packs with and without are trained in turn, a few steps each, in one process with one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import torch

from harness.config import Model, Train, Trial, sections
from harness.data.corpus import load_corpus
from harness.detectors.table import DETECTORS
from harness.loop.loop import train
from harness.model.state import State
from harness.testing.detectors import along_of
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule


def seconds(width: int, depth: int, size: int, steps: int, detect: str) -> float:
    """Of one trial-step, of the processor: others that work beside this do not count."""
    settings = Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1)
    extras = () if detect == "none" else (("detect", sections()["detect"](name=detect)),)
    trials = [Trial(model=Model(width=width, depth=depth), train=settings, seed=seed) for seed in range(size)]
    trials = [dataclasses.replace(trial, extras=extras) for trial in trials]
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device("cpu"))
    started = time.process_time()
    train(pack, FaultSchedule([None] * size), 50, lambda first, signals: None)
    return (time.process_time() - started) / steps / size


def judged(name: str, depth: int, size: int, steps: int = 400) -> float:
    """Seconds of the detector's own part of a step of a pack."""
    cls, options = DETECTORS[name], sections().get(f"detect.{name}")
    sizes = {"layer": depth, "rank": 2}
    shapes = {signal: (size, *(sizes[dim] for dim in along_of(signal))) for signal in cls.watches}
    values = [{signal: 1 + torch.rand(shape).double() for signal, shape in shapes.items()} for _ in range(50)]
    detector = cls("detector", [options and options()] * size, values[0], State(size))
    everyone = torch.ones(size, dtype=torch.bool)
    started = time.process_time()
    for step in range(steps):
        detector.judge(values[step % len(values)], everyone)
    return (time.process_time() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *DETECTORS])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.names or ["combined"]:
        for width, depth, size, steps in ((32, 2, 8, 60), (64, 4, 8, 20), (128, 4, 8, 8)):
            ratios, watched = [], []
            for i in range(options.rounds):
                order = (name, "none") if i % 2 else ("none", name)
                both = {detect: seconds(width, depth, size, steps, detect) for detect in order}
                ratios.append(both[name] / both["none"])
                watched.append(judged(name, depth, size) / (both["none"] * size))
            # The two of a round follow each other, so slow changes of the machine's speed fall out of their ratio.
            low, ratio, high = statistics.quantiles(ratios, n=4)
            alone = statistics.median(watched)
            print(
                f"{name}, width {width}, depth {depth}, {size} trials: step watched / not = {ratio:.3f} "
                f"(half of the rounds in {low:.3f} to {high:.3f}); judging alone / step = {alone:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
