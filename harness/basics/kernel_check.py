"""Products of the shapes that packs have: whether they are right, and how long they take, on one thread.

    python -m harness.basics.kernel_check [ANSWER]

With ANSWER, 1 or 0, MKL takes that for whether the CPU is Intel's. Prints JSON: `is_right` and `seconds`.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch

from harness.basics.cpu_kernels import write_answer

SHAPES = [(8, 512, width, 4 * width) for width in (32, 64, 128)] + [(1, 512, 512, 512)]  # trials, rows, inner, columns
ROUNDS = 9


def main(arguments: list[str]) -> None:
    """Multiply, and print what was found."""
    if arguments and arguments[0]:
        write_answer(arguments[0] == "1")
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(count, rows, inner, generator=draw), torch.randn(count, inner, columns, generator=draw))
        for count, rows, inner, columns in SHAPES
    ]
    is_right = all(_is_right(a, b) for a, b in pairs)
    print(json.dumps({"is_right": is_right, "seconds": sum(_seconds(a, b) for a, b in pairs)}))


def _is_right(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Within what float32 may be off by, of numpy's products in float64, which MKL has no part in.

    The bound for a sum of n products is n eps |a| |b|, whatever their order (Higham 2002, section 3.1).
    """
    wide_a, wide_b = (x.numpy().astype(np.float64) for x in (a, b))
    allowed = a.shape[-1] * np.finfo(np.float32).eps * (np.abs(wide_a) @ np.abs(wide_b))
    return bool((np.abs((a @ b).numpy() - wide_a @ wide_b) <= allowed).all())


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """The least of some rounds: others use the machine, too."""
    found = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(3):
            torch.bmm(a, b)
        found.append(time.perf_counter() - begin)
    return min(found)


if __name__ == "__main__":
    main(sys.argv[1:])
