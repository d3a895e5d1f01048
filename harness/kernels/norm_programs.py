"""The programs of LayerNorm and RMSNorm, as Triton reads them: one row and a group of its tokens each.

What `programs.py` says of its own holds here too. A group is fixed by the number of features, and by nothing else. A
token's mean and scale, 1 / its deviation or root mean square, are taken in the precision of the gain, or in float32 if
that is half: the mean first, and then what is left of it is squared. Arrays of activations are [R, N, D], N tokens of D
features; the rows of gains and their gradients lie `stride` apart.
"""

from __future__ import annotations

import triton.language as tl


def normed(
    x_RxNxD: tl.tensor,
    gain_RxD: tl.tensor,
    y_RxNxD: tl.tensor,
    kept_RxSxN: tl.tensor,
    N: tl.tensor,
    stride: tl.tensor,
    EPSILON: tl.constexpr,
    IS_LAYER: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The norm of each token times the row's gain; it leaves the means, with IS_LAYER, and the scales behind them."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * TOKENS
    places, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    is_token, is_column = first + places < N, columns < D
    here = is_token[:, None] & is_column[None, :]
    start, at = (row * N + first) * D, places[:, None] * D + columns[None, :]
    gain = tl.load(gain_RxD + row * stride + columns, mask=is_column, other=0.0)
    dtype: tl.constexpr = tl.float64 if gain.dtype == tl.float64 else tl.float32
    x = tl.load(x_RxNxD + start + at, mask=here, other=0.0).to(dtype)

    left, kept = x, kept_RxSxN + row * N * (2 if IS_LAYER else 1) + first + places
    if IS_LAYER:
        mean = tl.sum(x, 1) * (1.0 / D)
        left = tl.where(here, x - mean[:, None], 0.0)
        tl.store(kept, mean, mask=is_token)
        kept += N
    square = tl.sum(left * left, 1) * (1.0 / D) + EPSILON
    scale = tl.div_rn(1.0, tl.sqrt_rn(square)) if dtype == tl.float32 else 1.0 / tl.sqrt(square)
    tl.store(kept, scale, mask=is_token)
    tl.store(y_RxNxD + start + at, left * scale[:, None] * gain.to(dtype)[None, :], mask=here)


def normed_backward(
    dy_RxNxD: tl.tensor,
    x_RxNxD: tl.tensor,
    kept_RxSxN: tl.tensor,
    gain_RxD: tl.tensor,
    beside_RxNxD: tl.tensor,
    dx_RxNxD: tl.tensor,
    partial_RxKxD: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    stride: tl.tensor,
    IS_LAYER: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The gradient of x, and what each block of tokens adds to that of the gain.

    With HAS_BESIDE, another gradient of x is added once this one is rounded to its type, as autograd would add it.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    places, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    is_column, at = columns < D, places[:, None] * D + columns[None, :]
    gain = tl.load(gain_RxD + row * stride + columns, mask=is_column, other=0.0)
    dtype: tl.constexpr = tl.float64 if gain.dtype == tl.float64 else tl.float32
    gain = gain.to(dtype)
    dgain = tl.zeros([TOKENS, COLUMNS], dtype=dtype)
    for first in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, N), TOKENS):
        is_token = first + places < N
        here, start = is_token[:, None] & is_column[None, :], (row * N + first) * D
        x = tl.load(x_RxNxD + start + at, mask=here, other=0.0).to(dtype)
        dy = tl.load(dy_RxNxD + start + at, mask=here, other=0.0).to(dtype)
        kept = kept_RxSxN + row * N * (2 if IS_LAYER else 1) + first + places
        if IS_LAYER:
            x -= tl.load(kept, mask=is_token, other=0.0)[:, None]
            kept += N
        scale = tl.load(kept, mask=is_token, other=0.0)[:, None]
        normed = x * scale
        dgain += dy * normed
        dy *= gain[None, :]
        dx = dy - normed * (tl.sum(dy * normed, 1) * (1.0 / D))[:, None]
        if IS_LAYER:
            dx -= (tl.sum(dy, 1) * (1.0 / D))[:, None]
        dx = (dx * scale).to(dx_RxNxD.dtype.element_ty)
        if HAS_BESIDE:
            beside = tl.load(beside_RxNxD + start + at, mask=here, other=0.0)
            dx = dx.to(dtype) + beside.to(dtype)
        tl.store(dx_RxNxD + start + at, dx, mask=here)
    tl.store(partial_RxKxD + (row * K + block) * D + columns, tl.sum(dgain, 0), mask=is_column)


def add_blocks(
    partial_RxKxD: tl.tensor,
    sums_RxD: tl.tensor,
    K: tl.tensor,
    D: tl.tensor,
    stride: tl.tensor,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The sums of all blocks of a row, `PARTS` of them at a time."""
    row = tl.program_id(1).to(tl.int64)
    parts, columns = tl.arange(0, PARTS)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], dtype=partial_RxKxD.dtype.element_ty)
    for first in range(0, K, PARTS):
        here = (first + parts < K) & (columns < D)[None, :]
        at = (row * K + first + parts) * D + columns[None, :]
        total += tl.load(partial_RxKxD + at, mask=here, other=0.0)
    tl.store(sums_RxD + row * stride + columns, tl.sum(total, 0), mask=columns < D)
