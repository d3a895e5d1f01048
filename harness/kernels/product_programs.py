"""Matrix products as Triton reads them: one tile of one product, whose sum runs along K in one order.

It is told nothing of how many products there are. Sums are those of `STATE`, float32 or float64.
"""

from __future__ import annotations

import triton.language as tl


def multiply(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    a_batch: tl.tensor,
    a_line: tl.tensor,
    a_column: tl.tensor,
    b_batch: tl.tensor,
    b_line: tl.tensor,
    b_column: tl.tensor,
    out_batch: tl.tensor,
    out_line: tl.tensor,
    SCALE: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOME: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> None:
    """scale x a @ b, [M, N], of [M, K] and [K, N], each with its own strides; columns of `out` follow one another."""
    across = (N + COLUMNS - 1) // COLUMNS
    tiles = (M + LINES - 1) // LINES * across
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    lines, columns = tile // across * LINES + tl.arange(0, LINES), tile % across * COLUMNS + tl.arange(0, COLUMNS)
    wide_lines, wide_columns = lines.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    total = tl.zeros([LINES, COLUMNS], STATE)
    for first in range(0, K, SOME):
        along = first + tl.arange(0, SOME)
        in_a, in_b = (lines[:, None] < M) & (along[None, :] < K), (along[:, None] < K) & (columns[None, :] < N)
        left = tl.load(a + batch * a_batch + wide_lines * a_line + along[None, :] * a_column, mask=in_a, other=0.0)
        right = tl.load(b + batch * b_batch + along[:, None] * b_line + wide_columns * b_column, mask=in_b, other=0.0)
        total = tl.dot(left, right, total, input_precision=FORM, out_dtype=STATE)
    total = total * tl.full([1, 1], SCALE, STATE)
    inside = (lines[:, None] < M) & (columns[None, :] < N)
    tl.store(
        out + batch * out_batch + wide_lines * out_line + wide_columns, total.to(out.dtype.element_ty), mask=inside
    )
