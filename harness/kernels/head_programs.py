"""Heads as Triton moves and turns them: one program for all ways, with one fixed configuration for each head width.

What passes is a copy, or rotated by products that are each rounded and then added: nothing is summed, so no element
depends on how many others there are, or on where they stand. What is narrower than the table is widened before that,
and rounded afterwards.
"""

from __future__ import annotations

import triton.language as tl


def heads(
    source_1: tl.tensor,
    source_2: tl.tensor,
    source_3: tl.tensor,
    target_1: tl.tensor,
    target_2: tl.tensor,
    target_3: tl.tensor,
    table_TxD: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TURNED: tl.constexpr,
    BACK: tl.constexpr,
    BESIDE_IN: tl.constexpr,
    BESIDE_OUT: tl.constexpr,
) -> None:
    """`PARTS` arrays of heads from their sources to their targets, the first `TURNED` of them by the positions' angles.

    A source or target lies as [S, H, T, D], if BESIDE is 0, or as [S, T, BESIDE, H, D]: with 3 they are one array, in
    which the parts stand beside one another. A program has `LINES` heads of tokens of one of the S sequences. The table
    has cosine and sine of each pair of columns; BACK turns the other way.
    """
    blocks = tl.cdiv(T * H, LINES)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    line = tl.program_id(0) % blocks * LINES + tl.arange(0, LINES)
    token, head = (line // H).to(tl.int64)[:, None], (line % H)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    here = (line < T * H)[:, None] & (columns < D)
    if TURNED > 0:
        angles = tl.load(table_TxD + token * D + columns, mask=here, other=0.0)
        cos, sin = tl.split(tl.reshape(angles, [LINES, COLUMNS // 2, 2]))
        if BACK:
            sin = -sin
    apart = (sequence * H + head) * T * D + token * D + columns
    for part in tl.static_range(PARTS):
        source = source_1 if part == 0 else source_2 if part == 1 else source_3
        target = target_1 if part == 0 else target_2 if part == 1 else target_3
        if BESIDE_IN == 0:
            values = tl.load(source + apart, mask=here)
        else:
            first = ((sequence * T + token) * BESIDE_IN + part % BESIDE_IN) * H * D
            values = tl.load(source + (first + head * D + columns), mask=here)
        if part < TURNED:
            pairs = tl.reshape(values.to(angles.dtype), [LINES, COLUMNS // 2, 2])
            a, b = tl.split(pairs)
            turned = tl.join(a * cos - b * sin, a * sin + b * cos)
            values = tl.reshape(turned, [LINES, COLUMNS]).to(values.dtype)
        if BESIDE_OUT == 0:
            tl.store(target + apart, values, mask=here)
        else:
            first = ((sequence * T + token) * BESIDE_OUT + part % BESIDE_OUT) * H * D
            tl.store(target + (first + head * D + columns), values, mask=here)
