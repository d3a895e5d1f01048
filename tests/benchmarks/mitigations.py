"""What every mitigation costs: the time of a step with it over one of the recipe as it is.

    python -m tests.benchmarks.mitigations [--rounds 7] [--width 64] [--depth 2] [NAME ...]

All telemetry is on. The pack with the mitigation and the one without are trained in turn, a few steps each, in one
process with one thread, and the two of a round are compared with each other.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from harness.config import Trial
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from sweeps.compose.arguments import config_loader
from sweeps.compose.grid import Composer
from tests.sweeps.command import general_mitigations

MIDDLE = 500  # of 1,000 steps: sequences, batches and branches have grown to their full size
EXPLAINED = 1.3  # a ratio above it is explained in docs/benchmarks.md


def seconds(trials: list[Trial], steps: int, device: str) -> float:
    """Of one trial-step, without the first steps, in which caches fill."""
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device(device))
    fault_schedule = FaultSchedule([None] * len(trials))
    pack.row_steps.on_device.fill_(MIDDLE)
    pack.row_steps.read()
    train(pack, fault_schedule, 50, lambda first, signals: None, until=MIDDLE + 2)
    started = time.perf_counter()
    train(pack, fault_schedule, 50, lambda first, signals: None, until=MIDDLE + 2 + steps)
    return (time.perf_counter() - started) / steps / len(trials)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mitigations; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loader = config_loader()
    composer = Composer(loader, "grid")

    def trials(mitigation: str) -> list[Trial]:
        shape = [f"model.width={options.width}", f"model.depth={options.depth}", "train.steps=1000"]
        fixed = [*shape, f"mitigation={mitigation}", "train.validate_every=1000000"]
        return [composer.trial([*fixed, f"seed={seed}"]) for seed in range(options.trials)]

    baseline = trials("none")
    print(f"width {options.width}, depth {options.depth}, {options.trials} trials: step with / without")
    for name in options.names or general_mitigations():
        ours, ratios = trials(name), []
        for i in range(options.rounds):
            both = {
                on: seconds(ours if on else baseline, options.steps, options.device) for on in (i % 2 == 0, i % 2 != 0)
            }
            ratios.append(both[True] / both[False])
        low, ratio, high = statistics.quantiles(ratios, n=4)
        mark = "  above 1.3" if ratio > EXPLAINED else ""
        print(f"{name:22s} {ratio:5.2f} (half of the rounds in {low:.2f} to {high:.2f}){mark}", flush=True)


if __name__ == "__main__":
    main()
