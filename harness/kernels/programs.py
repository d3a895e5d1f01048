"""The programs, as Triton reads them: one row and one block of columns each, or one sum.

Every program has one fixed configuration, adds up in one order and writes to places that are its own. It is told
nothing of R, so a row's bits depend neither on R nor on where the row stands. Arithmetic is rounded as it is written
(`operators.py` allows no contractions but `fma`), quotients and roots to nearest. What holds for a row or a group of
columns is computed in float64, and rounded to the arrays' precision before it meets an element.

Programs are numbered in one go, row by row: only the first axis of a grid has room for more than 65,535.

A block is read and written up to `limit`: with IS_WHOLE a multiple of `VECTOR`, as Triton can then see, so that many
bytes pass at once. `inside` are the columns that count.
"""

from __future__ import annotations

import triton.language as tl

from harness.kernels import blocks

ADDED = tl.constexpr(1024)  # partial sums at a time
BLOCK = tl.constexpr(blocks.BLOCK)
VECTOR = tl.constexpr(blocks.VECTOR)


def adamw(
    weights_RxP: tl.tensor,
    gradients_RxP: tl.tensor,
    first_RxP: tl.tensor,
    second_RxP: tl.tensor,
    partial_Rx3xN: tl.tensor,
    active_R: tl.tensor,
    rate_R: tl.tensor,
    short1_R: tl.tensor,
    short2_R: tl.tensor,
    beta1_R: tl.tensor,
    beta2_R: tl.tensor,
    epsilon_R: tl.tensor,
    decay_RxG: tl.tensor,
    multipliers_Gx2: tl.tensor,
    table_3xN: tl.tensor,
    P: tl.tensor,
    N: tl.tensor,
    G: tl.tensor,
    IS_WHOLE: tl.constexpr,
    MEASURE: tl.constexpr,
) -> None:
    """One step of AdamW, by the arithmetic of torch's fused kernel for CPUs; a row that is not active stays.

    `short` is 1 - beta^count, `multipliers` those of the rate and of epsilon in each group of columns. With MEASURE it
    leaves sums of squares of what stands after the step: weights, second moment, and the change of the weights.
    """
    block, row = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    start, end = tl.load(table_3xN + block), tl.load(table_3xN + N + block)
    group, limit = tl.load(table_3xN + 2 * N + block), end
    if IS_WHOLE:
        start, limit = tl.multiple_of(start, VECTOR), (end + VECTOR - 1) // VECTOR * VECTOR
    columns = start + tl.arange(0, BLOCK)
    here, inside, at = columns < limit, columns < end, row * P + columns
    weights = tl.load(weights_RxP + at, mask=here, other=0.0)
    gradients = tl.load(gradients_RxP + at, mask=here, other=0.0)
    first = tl.load(first_RxP + at, mask=here, other=0.0)
    second = tl.load(second_RxP + at, mask=here, other=0.0)
    dtype = weights.dtype

    rate = tl.load(rate_R + row)
    rate = (rate * tl.load(multipliers_Gx2 + 2 * group).to(rate.dtype)).to(tl.float64)
    kept = tl.fma(-rate, tl.load(decay_RxG + row * G + group), 1.0).to(dtype)
    step = (rate / tl.load(short1_R + row)).to(dtype)
    root2 = tl.sqrt(tl.load(short2_R + row)).to(dtype)
    epsilon = (tl.load(epsilon_R + row) * tl.load(multipliers_Gx2 + 2 * group + 1)).to(dtype)
    rest1, beta2 = (1.0 - tl.load(beta1_R + row)).to(dtype), tl.load(beta2_R + row)
    rest2, beta2 = (1.0 - beta2).to(dtype), beta2.to(dtype)

    # The first moment as torch's `lerp` has it: from the nearer end.
    is_near = rest1 < 0.5
    moment_1 = tl.fma(tl.where(is_near, rest1, rest1 - 1.0), gradients - first, tl.where(is_near, first, gradients))
    moment_2 = tl.fma(rest2 * gradients, gradients, beta2 * second)
    if dtype == tl.float32:
        direction = tl.div_rn(-step * moment_1, tl.div_rn(tl.sqrt_rn(moment_2), root2) + epsilon)
    else:
        direction = -step * moment_1 / (tl.sqrt(moment_2) / root2 + epsilon)
    moves = inside & tl.load(active_R + row)
    after = tl.where(moves, weights * kept + direction, weights)
    moment_1, moment_2 = tl.where(moves, moment_1, first), tl.where(moves, moment_2, second)
    tl.store(weights_RxP + at, after, mask=here)
    tl.store(first_RxP + at, moment_1, mask=here)
    tl.store(second_RxP + at, moment_2, mask=here)
    if MEASURE:
        place = partial_Rx3xN + row * 3 * N + block
        square = tl.where(inside, after, 0.0).to(tl.float64)
        tl.store(place, tl.sum(square * square))
        square = tl.where(inside, moment_2, 0.0).to(tl.float64)
        tl.store(place + N, tl.sum(square * square))
        square = tl.where(inside, after - weights, 0.0).to(tl.float64)
        tl.store(place + 2 * N, tl.sum(square * square))


def powers(
    values_RxP: tl.tensor,
    partial_RxN: tl.tensor,
    table_3xN: tl.tensor,
    P: tl.tensor,
    N: tl.tensor,
    IS_WHOLE: tl.constexpr,
    POWER: tl.constexpr,
) -> None:
    """The sum of a power of each number of a block, float64."""
    block, row = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    start, end = tl.load(table_3xN + block), tl.load(table_3xN + N + block)
    limit = end
    if IS_WHOLE:
        start, limit = tl.multiple_of(start, VECTOR), (end + VECTOR - 1) // VECTOR * VECTOR
    columns = start + tl.arange(0, BLOCK)
    values = tl.load(values_RxP + row * P + columns, mask=columns < limit, other=0.0)
    values = tl.where(columns < end, values, 0.0).to(tl.float64)
    product = values
    for _ in tl.static_range(POWER - 1):
        product = product * values
    tl.store(partial_RxN + row * N + block, tl.sum(product))


def add_up(partial_rxN: tl.tensor, sums_rxS: tl.tensor, firsts: tl.tensor, N: tl.tensor, S: tl.tensor) -> None:
    """The sums of each span's blocks, one after another; a row here is a row of whatever was summed."""
    span, row = tl.program_id(0) % S, (tl.program_id(0) // S).to(tl.int64)
    first, last = tl.load(firsts + span), tl.load(firsts + span + 1)
    total = tl.zeros([ADDED], dtype=tl.float64)
    for left in range(first, last, ADDED):
        blocks_here = left + tl.arange(0, ADDED)
        total += tl.load(partial_rxN + row * N + blocks_here, mask=blocks_here < last, other=0.0)
    tl.store(sums_rxS + row * S + span, tl.sum(total))


def add_columns(
    x_GxNxD: tl.tensor,
    partial_GxKxD: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    K: tl.tensor,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The sum over `CHUNK` of N, `PARTS` of them at a time, in float64."""
    chunk, group = tl.program_id(0) % K, (tl.program_id(0) // K).to(tl.int64)
    parts, columns = tl.arange(0, PARTS)[:, None], tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], dtype=tl.float64)
    for first in range(chunk * CHUNK, chunk * CHUNK + CHUNK, PARTS):
        here = (first + parts < N) & (columns < D)[None, :]
        at = (group * N + first + parts) * D + columns[None, :]
        total += tl.load(x_GxNxD + at, mask=here, other=0.0).to(tl.float64)
    tl.store(partial_GxKxD + (group * K + chunk) * D + columns, tl.sum(total, 0), mask=columns < D)


def scale(
    values_RxP: tl.tensor,
    factors_RxS: tl.tensor,
    table_3xN: tl.tensor,
    P: tl.tensor,
    N: tl.tensor,
    S: tl.tensor,
    IS_WHOLE: tl.constexpr,
) -> None:
    """Each span of each row times its factor; where that is one, nothing is read or written."""
    block, row = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    factor = tl.load(factors_RxS + row * S + tl.load(table_3xN + 2 * N + block))
    if factor != 1.0:
        start, end = tl.load(table_3xN + block), tl.load(table_3xN + N + block)
        limit = end
        if IS_WHOLE:
            start, limit = tl.multiple_of(start, VECTOR), (end + VECTOR - 1) // VECTOR * VECTOR
        columns = start + tl.arange(0, BLOCK)
        here, at = columns < limit, row * P + columns
        values = tl.load(values_RxP + at, mask=here, other=0.0)
        tl.store(values_RxP + at, tl.where(columns < end, values * factor, values), mask=here)
