"""Whether cuBLAS rounds a product alike however many there are: a trial's bits must not go by the size of its pack.

Which kernel it takes goes by shapes and by the number of products, and kernels add up in one order or in another. So
each kind of product is tried once in a process: the same numbers, in packs of 2 to 256 rows. What comes out is the same
in every process on such a device with such a version, so it is kept nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from harness.kernels.use import are_used

TRIED = (2, 4, 8, 16, 32, 64, 128, 256)  # rows
ROOM = 2**29  # bytes of results
FEWEST = 16  # rows at a time that are worth it; with fewer the program is faster
Multiply = Callable[[Tensor, Tensor, float, Tensor], Tensor]

_KNOWN: dict[Hashable, int] = {}


def rows_at_once(a_RxxxMxK: Tensor, b_RxxxKxN: Tensor, tf32: bool, multiply: Multiply) -> int:
    """How many rows of such a product cuBLAS may be given at a time; 0: none, a program has to take its place.

    Raises RuntimeError where that is not known and a graph is being recorded, in which nothing can be tried.
    """
    a, b = a_RxxxMxK, b_RxxxKxN
    kind = a.device, a.dtype, tf32, a.shape[1:], a.stride()[-2:], b.shape[1:], b.stride()[-2:]
    if kind not in _KNOWN:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a product of a kind that has not been done before")
        agreeing = _agreeing(a, b, multiply)
        _KNOWN[kind] = 0 if agreeing < FEWEST and are_used(a.device) else agreeing
    return _KNOWN[kind]


def _agreeing(a: Tensor, b: Tensor, multiply: Multiply) -> int:
    """The largest number of rows up to which all that are tried leave the same bits."""
    generator = torch.Generator(a.device).manual_seed(0)
    one_a, one_b = (_of_one_row(x, generator) for x in (a, b))
    shape = (*a.shape[1:-1], b.shape[-1])
    most = ROOM // (torch.Size(shape).numel() * a.itemsize)
    first, agreeing = None, TRIED[0]
    for rows in TRIED:
        if rows > max(most, TRIED[0]):
            break
        out = a.new_empty(rows, *shape)
        multiply(one_a.expand(rows, *one_a.shape), one_b.expand(rows, *one_b.shape), 1.0, out)
        first = out[0].clone() if first is None else first
        if not bool((out == first).all()):
            break
        agreeing = rows
    return agreeing


def _of_one_row(x_Rxxx: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers that lie in memory as those of a row do."""
    row = torch.empty_strided(x_Rxxx.shape[1:], x_Rxxx.stride()[1:], dtype=x_Rxxx.dtype, device=x_Rxxx.device)
    drawn = torch.randn(row.shape, generator=generator, device=row.device, dtype=torch.float32)
    return row.copy_(drawn)
