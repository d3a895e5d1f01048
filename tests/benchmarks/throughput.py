"""Trial-steps per second of `python -m sweeps` against what a user would train the same GPTs with.

    python -m tests.benchmarks.throughput [--rounds 3] [--width 32 64 128 256 512] [--peer plain plain_each ...]

Ours is the whole command, with its workers, telemetry, validation and store; it runs twice, with few and with many
steps, and the difference of the two leaves out the start-up. Peers (tests/benchmarks/peers.py) train one GPT at a time,
or with JAX several; they are warm, and their start-up and compiling are left out, too. Every round measures ours and
each peer in turn. Where `cpu.kernels=auto` takes other kernels than torch does, peers are measured with both, and so is
ours.
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

from harness.basics.cpu_kernels import AS_IS
from tests.benchmarks.peers import BATCH, CONTEXT, HEAD_DIM, KINDS, Peer, Size, usual_kinds

SECONDS = 6.0  # that a peer is measured for in a round


@dataclass(frozen=True)
class Shape:
    """`wanted`: the ratio to the plain loop that has all cores."""

    width: int
    depth: int
    trials: int
    steps: tuple[int, int]
    wanted: float


SHAPES = {
    32: Shape(32, 2, 16, (50, 400), 2.0),
    64: Shape(64, 4, 16, (20, 220), 1.7),
    128: Shape(128, 4, 16, (10, 50), 1.15),
    256: Shape(256, 4, 4, (5, 45), 1.0),
    512: Shape(512, 4, 4, (4, 20), 0.95),
}


def ours(shape: Shape, kernels: str = "auto") -> float:
    """Trial-steps per second."""
    walls = []
    for steps in shape.steps:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "sweeps", f"out={Path(folder) / 'out'}", "device=cpu"]
            command += [f"model.width={shape.width}", f"model.depth={shape.depth}", f"model.head_dim={HEAD_DIM}"]
            command += [f"model.context={CONTEXT}", f"train.batch={BATCH}", f"train.steps={steps}", "optim.clip=1.0"]
            command += [f"seed=range({shape.trials})", f"cpu.kernels={kernels}"]
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            walls.append(time.perf_counter() - started)
    return shape.trials * (shape.steps[1] - shape.steps[0]) / (walls[1] - walls[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--peer", nargs="+", default=usual_kinds(), choices=list(KINDS))
    options = parser.parse_args()
    for width in options.width:
        measure(SHAPES[width], options.peer, options.rounds)


def measure(shape: Shape, kinds: list[str], rounds: int) -> None:
    """Print a line for each peer."""
    peers = {kind: Peer(kind, Size(shape.width, shape.depth)) for kind in kinds}
    mine, theirs = [], {kind: [] for kind in kinds}
    has_both = any(KINDS[kind].has_our_kernels for kind in kinds)
    theirs |= {AS_IS: []} if has_both else {}
    for _ in range(rounds):
        mine.append(ours(shape))
        if has_both:
            theirs[AS_IS].append(ours(shape, AS_IS))
        for kind, peer in peers.items():
            theirs[kind].append(peer.steps_a_second(SECONDS))
    for peer in peers.values():
        peer.close()
    print(f"width {shape.width}, depth {shape.depth}: {statistics.median(mine):.1f} trial-steps/s", flush=True)
    for kind, found in theirs.items():
        ratios = sorted(my / its for my, its in zip(mine, found, strict=True))
        goal = f"; goal {shape.wanted}" if kind == "plain" else ""
        label = "ours with cpu.kernels=as_is" if kind == AS_IS else KINDS[kind].label
        print(
            f"  {label}: {statistics.median(found):.1f}, ratio {statistics.median(ratios):.2f} "
            f"(rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}{goal})",
            flush=True,
        )


if __name__ == "__main__":
    main()
