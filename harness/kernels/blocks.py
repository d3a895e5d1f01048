"""How a flat [R, P] array is cut: a program of Triton has one row and one block of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 1024  # columns; never a function of R
VECTOR = 16  # columns: where blocks begin and end at multiples of it, programs read and write many bytes at once

Span = tuple[int, int]  # the first column, and the one behind the last


@dataclass(frozen=True)
class Blocks:
    """Blocks of columns, in the order of the spans that they are cut from; none stands in two spans.

    `table` [3, N]: the first column of each block, the one behind its last, and the number of the group that it belongs
    to. `firsts` [S + 1]: which blocks make up each sum: those from its own entry up to the next one. Both are int32, on
    the device of the arrays. If `is_whole`, a block may be read and written up to the next multiple of `VECTOR`: what
    stands there belongs to no span.
    """

    table: Tensor
    firsts: Tensor
    is_whole: bool

    @property
    def count(self) -> int:
        """N."""
        return self.table.shape[1]


def cut(spans: Sequence[Span], columns: int, device: torch.device, groups: Sequence[int] | None = None) -> Blocks:
    """Blocks of some spans of [R, `columns`] arrays, which follow one another. Every span has a sum of its own.

    `groups`: the number of each span's; then all blocks of a row make up one sum. None: each span is its own group.

    Tables are made once for each layout and device, and kept: nothing is copied from the host in a step, and a
    captured graph finds them where they were.
    """
    return _cut(tuple(spans), columns, device, None if groups is None else tuple(groups))


@cache
def _cut(spans: tuple[Span, ...], columns: int, device: torch.device, groups: tuple[int, ...] | None) -> Blocks:
    if device.type == "meta":  # a model that is planned may have more blocks than can be listed
        count = sum(-(-(stop - start) // BLOCK) for start, stop in spans)
        table = torch.empty((3, count), dtype=torch.int32, device=device)
        firsts_of = torch.empty(len(spans) + 1 if groups is None else 2, dtype=torch.int32, device=device)
        return Blocks(table, firsts_of, _is_whole(spans, columns))
    rows: list[tuple[int, int, int]] = []
    firsts = [0]
    for (start, stop), group in zip(spans, range(len(spans)) if groups is None else groups, strict=True):
        rows += [(left, min(left + BLOCK, stop), group) for left in range(start, stop, BLOCK)]
        firsts.append(len(rows))
    table = torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)
    sums = torch.tensor(firsts if groups is None else [0, len(rows)], dtype=torch.int32, device=device)
    return Blocks(table, sums, _is_whole(spans, columns))


def _is_whole(spans: tuple[Span, ...], columns: int) -> bool:
    """Whether every span starts at a multiple of `VECTOR`, and none reaches into the last one of another."""
    nexts = (*(start for start, _ in spans[1:]), columns)
    return all(start % VECTOR == 0 == then % VECTOR for (start, _), then in zip(spans, nexts, strict=True))
