"""Trial-steps per second of `python -m sweeps` against a plain PyTorch loop that trains one GPT at a time.

    python -m tests.benchmarks.throughput [--rounds 3] [--width 32 64 128 512]

The peer is an ordinary nn.Module with fused AdamW and gradient clipping on all cores (tests/plain_gpt.py). Ours is the
whole command, with its workers, telemetry, validation and store; it runs twice, with few and with many steps, and the
difference of the two leaves out the start-up. Both train on the same text, alternately in one run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    trials: int
    steps: tuple[int, int]
    peer_steps: int
    wanted: float


SHAPES = {
    32: Shape(32, 2, 16, (50, 400), 800, 2.0),
    64: Shape(64, 4, 16, (20, 220), 600, 1.7),
    128: Shape(128, 4, 16, (10, 50), 150, 1.15),
    512: Shape(512, 4, 4, (4, 20), 20, 0.95),
}
CONTEXT, BATCH, HEAD_DIM = 64, 8, 16


def ours(shape: Shape) -> float:
    """Trial-steps per second."""
    walls = []
    for steps in shape.steps:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "sweeps", f"out={Path(folder) / 'out'}", "device=cpu"]
            command += [f"model.width={shape.width}", f"model.depth={shape.depth}", f"model.head_dim={HEAD_DIM}"]
            command += [f"model.context={CONTEXT}", f"train.batch={BATCH}", f"train.steps={steps}", "optim.clip=1.0"]
            command += [f"seed=range({shape.trials})"]
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            walls.append(time.perf_counter() - started)
    return shape.trials * (shape.steps[1] - shape.steps[0]) / (walls[1] - walls[0])


def peer(shape: Shape) -> float:
    """Trial-steps per second, in a process of its own that has all cores."""
    arguments = [str(x) for x in (shape.width, shape.depth, shape.peer_steps)]
    command = [sys.executable, "-m", "tests.benchmarks.throughput", "--peer", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_peer(width: int, depth: int, steps: int) -> float:
    """The plain loop; batches are drawn as nanoGPT draws them."""
    import torch

    from harness.config import Data
    from harness.data.corpus import load_corpus
    from tests.plain_gpt import PlainGPT, train_plain

    tokens = torch.from_numpy(load_corpus(Data(), CONTEXT).train.copy()).long()
    generator = torch.Generator().manual_seed(0)

    def batch(step: int) -> torch.Tensor:
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        return torch.stack([tokens[i : i + CONTEXT + 1] for i in starts])

    model = PlainGPT(vocabulary=256, width=width, depth=depth, head_dim=HEAD_DIM, context=CONTEXT)
    train_plain(model, batch, steps=5, lr=1e-3, clip=1.0)
    started = time.perf_counter()
    train_plain(model, batch, steps=steps, lr=1e-3, clip=1.0)
    return steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--peer", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(run_peer(*options.peer))
        return
    for width in options.width:
        shape = SHAPES[width]
        rounds = [(ours(shape), peer(shape)) for _ in range(options.rounds)]
        ratios = sorted(mine / theirs for mine, theirs in rounds)
        mine, theirs = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"width {shape.width}, depth {shape.depth}: {mine:.1f} trial-steps/s against {theirs:.1f}, "
            f"ratio {statistics.median(ratios):.2f} "
            f"(rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}; goal {shape.wanted})",
            flush=True,
        )


if __name__ == "__main__":
    main()
