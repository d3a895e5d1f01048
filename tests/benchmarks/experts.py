"""What a mixture of experts costs: a step of it over the dense one of as many active weights, and of its variants.

    python -m tests.benchmarks.experts [--rounds 5] [--steps 16] [--width 32 64 128]

Four experts, two for each token, of half the dense hidden size each. Packs take turns in one process; compared are the
medians of their steps, in the time of the one thread on its core, so other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from harness.config import Model, Train, Trial, sections
from harness.data.corpus import load_corpus
from harness.loop.loop import train
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule

SHAPES = {32: 8, 64: 8, 128: 4}  # width: trials of a pack
FIRST = 3  # steps that are left out: memory is taken in them
MOE: dict[str, Any] = {"experts": 4, "top": 2}
QUIET = {"expert_loads": 0, "router_scores": 0, "stale_routes": 0}
VARIANTS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {  # what: over what, mixer, moe, signals
    "moe": ("dense", "moe", MOE, QUIET),
    "with its readings": ("moe", "moe", MOE, {}),
    "moe.lag=16": ("moe", "moe", MOE | {"lag": 16}, QUIET),
    "moe.routing=frozen": ("moe", "moe", MOE | {"routing": "frozen"}, QUIET),
    "moe.experts=8": ("moe", "moe", MOE | {"experts": 8}, QUIET),
    "moe.capacity=1.25": ("moe", "moe", MOE | {"capacity": 1.25}, QUIET),
}


def trials_of(width: int, steps: int, mixer: str, moe: dict[str, Any], signals: dict[str, int]) -> list[Trial]:
    settings = Train(steps=steps, batch=8, validate_every=10**6, validate_tokens=1, validate_between=1)
    known = sections()
    parts = {"model": Model(width=width, activation="swiglu"), "train": settings}
    parts |= {"block": known["block"](channel_mixer=mixer), "signals": known["signals"](**signals)}
    parts |= {"moe": known["moe"](**moe)} if mixer == "moe" else {}
    return [Trial.of(parts, seed=seed) for seed in range(SHAPES[width])]


def step_seconds(*given: Any) -> float:
    """The median step of such a pack."""
    trials = trials_of(*given)
    pack = Pack(trials, load_corpus(trials[0].data, trials[0].model.context), torch.device("cpu"))
    ends: list[float] = []
    train(
        pack, FaultSchedule([None] * len(trials)), 10**6, lambda *_: None, lambda *_: ends.append(time.process_time())
    )
    return statistics.median(after - before for before, after in zip(ends[FIRST:-2], ends[FIRST + 1 : -1], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, nargs="+", default=list(SHAPES), choices=SHAPES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"step over another's, median (range) of {given.rounds} rounds in turn; width {given.width}")
    kinds = {"dense": ("feedforward", {}, QUIET)} | {name: kind[1:] for name, kind in VARIANTS.items()}
    ratios: dict[tuple[str, int], list[float]] = {}
    for number in range(given.rounds):
        for width in given.width:
            names = list(kinds) if number % 2 else list(kinds)[::-1]
            seconds = {name: step_seconds(width, given.steps, *kinds[name]) for name in names}
            for name, (base, *_) in VARIANTS.items():
                ratios.setdefault((name, width), []).append(seconds[name] / seconds[base])
    for name, (base, *_) in VARIANTS.items():
        each = (ratios[name, width] for width in given.width)
        told = [f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in each]
        print(f"  {name} over {base}: {', '.join(told)}")


if __name__ == "__main__":
    main()
