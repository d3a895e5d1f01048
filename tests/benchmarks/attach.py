"""What an attached run costs that is armed and not due: a step of a GPT of 4 layers, against the same step alone.

python -m tests.benchmarks.attach [WIDTH ...]
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from harness import attach
from tests.plain_gpt import PlainGPT

DEPTH, CONTEXT, BATCH, VOCABULARY = 4, 256, 8, 256
STEPS = {64: 40, 256: 8}  # in a round, by width
TURNS = 4  # of each in a round: the machine's speed changes from second to second
ROUNDS = 10
NEVER = 10**6
CASES: dict[str, dict[str, Any]] = {
    "attached alone": {"detect": None},
    "default detectors": {},
    "default detectors, armed and not due": {"fault": {"name": "weight_bit", "start": NEVER - 1}, "twin": False},
    "the same, and playbook ladder": {
        "fault": {"name": "weight_bit", "start": NEVER - 1},
        "twin": False,
        "recover": "ladder",
    },
    "the same, playbook repair (a snapshot a step)": {"twin": False, "recover": "repair"},
}


def loop(width: int) -> tuple[Any, Any, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = PlainGPT(VOCABULARY, width, DEPTH, 64, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def body(tokens: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, optimizer, body


def batches() -> Any:
    draw = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=draw)


def main() -> None:
    """Each case takes turns with the loop alone, a few steps each; medians of the ratios of rounds."""
    for width in [int(word) for word in sys.argv[1:]] or STEPS:
        measure(width, STEPS.get(width, 8))


def measure(width: int, steps: int) -> None:
    """Print a line for each case at one width."""
    print(f"width {width}, {DEPTH} layers, {BATCH} x {CONTEXT} tokens, {torch.get_num_threads()} threads")
    for name, options in CASES.items():
        alone, own = loop(width)[2], loop(width)
        model, optimizer, body = own
        with warnings.catch_warnings(action="ignore"), attach(model, optimizer, steps=NEVER, **options) as run:
            source, given = batches(), run.steps(batches())
            ratios, seconds = [], []
            for number in range(ROUNDS + 2):
                of = {True: 0.0, False: 0.0}
                for turn in range(2 * TURNS):  # ABBA ...
                    is_attached = (turn + 1) // 2 % 2 == number % 2
                    begin = time.perf_counter()
                    for _ in range(steps // TURNS):
                        if is_attached:
                            run.observe(body(next(given)))
                        else:
                            alone(next(source))
                    of[is_attached] += time.perf_counter() - begin
                if number >= 2:
                    ratios.append(of[True] / of[False])
                    seconds.append(of[False] / steps)
        middle = statistics.median(ratios)
        low, high = sorted(ratios)[1], sorted(ratios)[-2]
        print(f"{name:<48} {middle:.3f} ({low:.3f} to {high:.3f}) of a step of {statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()
