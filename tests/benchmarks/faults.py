"""What faults cost, each as a ratio in one run.

    python -m tests.benchmarks.faults [--rounds 15]

- Forks: 64 faults at half time, over the same 64 trials trained from the first step; goal 0.56.
- Disarmed: a loop whose injectors are never due, over one without any; goal 1.01.
- Armed: a step in which every trial is struck, at a site, over a plain one; goal 2.
- Memory: how much the process grows when one element of a tensor of 256 MiB is struck, over the tensor; goal: nothing.

Packs are trained in turn, in one process with one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import time
from collections.abc import Sequence

import torch

from harness.config import Model, Train, Trial
from harness.data.corpus import load_corpus
from harness.faults.facts import Facts
from harness.faults.fault import injector_of
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.pack_sizes import rows_at_once
from harness.training.sites import FaultSchedule, Site, SiteCall
from injectors.value import SITES, Value

SHAPES = ((32, 2, 60), (64, 4, 24))  # width, depth, steps


def small(width: int, depth: int, steps: int, seed: int = 0) -> Trial:
    return Trial(
        model=Model(width=width, depth=depth),
        train=Train(steps=steps, validate_every=10**6, validate_tokens=1, validate_between=1),
        seed=seed,
    )


def seconds(trials: Sequence[Trial], forks: bool, device: torch.device, armed: bool = True) -> float:
    """To train the trials in one pack; rows come when faults begin, or all at once."""
    corpus = load_corpus(trials[0].data, trials[0].model.context)
    fault_schedule = FaultSchedule([injector_of(trial, corpus) if armed else None for trial in trials])
    pack = Pack(trials, corpus, device, fault_schedule.first if forks else None)
    started = time.perf_counter()
    train(pack, fault_schedule, 50, lambda first, signals: None)
    return time.perf_counter() - started


def forks(width: int, depth: int, steps: int, rounds: int, device: torch.device) -> None:
    golden = small(width, depth, steps)
    # A bit that no run is likely to mask, so that no row goes early; nor to break it, so that none freezes.
    flips = [Value(bit=22, tensor="head", element=element, start=steps // 2) for element in range(64)]
    faulty = [dataclasses.replace(golden, fault=fault) for fault in flips]
    size = rows_at_once(golden.model, golden.train.batch, device)
    ratios = []
    for _ in range(rounds):
        forked = seconds([golden, *faulty], True, device)
        ratios.append(forked / sum(seconds(faulty[i : i + size], False, device) for i in range(0, 64, size)))
    say(f"width {width}, depth {depth}: 64 faults at half time, forked / 64 full runs", ratios, 0.56)


def disarmed(width: int, depth: int, steps: int, rounds: int, device: torch.device) -> None:
    late = [Value(site=site, start=10**9) for site in SITES]
    trials = [dataclasses.replace(small(width, depth, steps, seed), fault=late[seed]) for seed in range(8)]
    ratios = []
    for i in range(2 * rounds):
        both = {armed: seconds(trials, False, device, armed) for armed in (i % 2 == 0, i % 2 != 0)}
        ratios.append(both[True] / both[False])
    say(f"width {width}, depth {depth}: loop with injectors that are never due / without any", ratios, 1.01)


def armed(width: int, depth: int, steps: int, rounds: int, device: torch.device) -> None:
    for site in (Site.WEIGHT, Site.ACTIVATION, Site.ACTIVATION_GRADIENT, Site.REDUCED_GRADIENT, Site.UPDATE):
        fault = Value(site=site, bit=0, start=0, duration=None)
        trials = [dataclasses.replace(small(width, depth, steps, seed), fault=fault) for seed in range(8)]
        ratios = []
        for i in range(rounds):
            both = {on: seconds(trials, False, device, on) for on in (i % 2 == 0, i % 2 != 0)}
            ratios.append(both[True] / both[False])
        say(f"width {width}, depth {depth}: every trial struck at every step, {site} / plain", ratios, 2.0)


def memory() -> None:
    tensor, small = torch.ones(2**26), torch.ones(8)
    facts = Facts(1000, {"large": tuple(tensor.shape), "small": (8,)})
    for site in (Site.WEIGHT, Site.UPDATE):
        injector = Value(site=site, tensor="large", bit=30, start=0).arm(facts)
        warm = Value(site=site, tensor="small", bit=30, start=0).arm(facts)
        for call, step in warm.calls:  # whatever is loaded when a fault strikes for the first time
            warm.visit(SiteCall(call, step, {"small": small}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for call, step in injector.calls:
            injector.visit(SiteCall(call, step, {"large": tensor}))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        share = grown / (tensor.numel() * tensor.element_size())
        print(f"one element of 256 MiB, {site}: memory grown / tensor = {share:.4f} (goal 0)", flush=True)


def say(what: str, ratios: Sequence[float], goal: float) -> None:
    low, ratio, high = statistics.quantiles(ratios, n=4)
    print(f"{what} = {ratio:.3f} (half of the rounds in {low:.3f} to {high:.3f}; goal {goal})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    memory()
    for width, depth, steps in SHAPES:
        forks(width, depth, steps, max(3, options.rounds // 5), device)
        disarmed(width, depth, steps, options.rounds, device)
        armed(width, depth, steps, max(3, options.rounds // 3), device)


if __name__ == "__main__":
    main()
