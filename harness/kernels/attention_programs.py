"""Causal attention as Triton reads it: one head of one sequence of one trial, and one tile of its queries or keys.

A tile of scores is computed where it is needed, or read where scores are given; what follows is the same arithmetic on
tiles of the same shape. Scores, shares of the softmax as products read them, and their gradients have the type of q, k
and v; exponentials and sums are those of `STATE`, float32 or float64. Tiles of which no query sees a key are skipped
where scores are computed: there are only zeros.

q, k, v: [T, D] of each head; what they are mixed to, and its gradient: [T, H, D]; scores: [T, T]. Products go over SOME
features at a time. WIDE: features, rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.kernels import asked

ALL, SHARES, SCORES = (tl.constexpr(what) for what in (asked.ALL, asked.SHARES, asked.SCORES))
SOME = tl.constexpr(16)


@triton.jit
def _before(group: tl.tensor, T: tl.tensor, H: tl.tensor, D: tl.tensor) -> tl.tensor:
    """Where the head begins in [..., T, H, D], which is its number `group` in [..., H, T, D]."""
    return group // H * T * H * D + group % H * D


@triton.jit
def _lines(
    x_TxD: tl.tensor, first: tl.tensor, T: tl.tensor, D: tl.tensor, line: tl.tensor, M: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:
    """[M, WIDE] from a line on, each of which is so long; 0 beyond the last one."""
    rows, features = first + tl.arange(0, M), tl.arange(0, WIDE)
    inside = (rows[:, None] < T) & (features[None, :] < D)
    return tl.load(x_TxD + rows[:, None] * line + features[None, :], mask=inside, other=0.0)


@triton.jit
def _keep(
    x_TxD: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    line: tl.tensor,
    M: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Store what `_lines` would read."""
    rows, features = first + tl.arange(0, M), tl.arange(0, WIDE)
    inside = (rows[:, None] < T) & (features[None, :] < D)
    tl.store(x_TxD + rows[:, None] * line + features[None, :], values.to(x_TxD.dtype.element_ty), mask=inside)


@triton.jit
def _product(
    a_TxD: tl.tensor,
    b_TxD: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    line: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> tl.tensor:
    """Lines of a, each so long, from `left` on, times lines of b from `right` on: [M, N]."""
    rows, columns = left + tl.arange(0, M), right + tl.arange(0, N)
    total = tl.zeros([M, N], STATE)
    for first in range(0, WIDE, SOME):
        features = first + tl.arange(0, SOME)
        in_a = (rows[:, None] < T) & (features[None, :] < D)
        in_b = (columns[None, :] < T) & (features[:, None] < D)
        a = tl.load(a_TxD + rows[:, None] * line + features[None, :], mask=in_a, other=0.0)
        b = tl.load(b_TxD + columns[None, :] * D + features[:, None], mask=in_b, other=0.0)
        total = tl.dot(a, b, total, input_precision=FORM, out_dtype=STATE)
    return total


@triton.jit
def _scores(
    q_TxD: tl.tensor,
    k_TxD: tl.tensor,
    scores_TxT: tl.tensor,
    given: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    SCALE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> tl.tensor:
    """A tile of scores as the softmax reads them: those that are given, or -inf where a query does not see the key."""
    rows, columns = left + tl.arange(0, M)[:, None], right + tl.arange(0, N)[None, :]
    if given:
        inside = (rows < T) & (columns < T)
        scores = tl.load(scores_TxT + rows * T + columns, mask=inside, other=float("-inf")).to(STATE)
    else:
        scores = _product(q_TxD, k_TxD, left, right, T, D, D, M, N, WIDE, FORM, STATE) * tl.full([1, 1], SCALE, STATE)
        scores = scores.to(q_TxD.dtype.element_ty).to(STATE)
        scores = tl.where((columns <= rows) & (columns < T), scores, float("-inf"))
    return scores


@triton.jit
def _tile(
    x_TxT: tl.tensor, left: tl.tensor, right: tl.tensor, T: tl.tensor, M: tl.constexpr, N: tl.constexpr
) -> tl.tensor:
    """[M, N] of something [T, T]; 0 beyond it."""
    rows, columns = left + tl.arange(0, M)[:, None], right + tl.arange(0, N)[None, :]
    return tl.load(x_TxT + rows * T + columns, mask=(rows < T) & (columns < T), other=0.0)


@triton.jit
def _keep_tile(
    x_TxT: tl.tensor,
    values: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    T: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Store what `_tile` would read."""
    rows, columns = left + tl.arange(0, M)[:, None], right + tl.arange(0, N)[None, :]
    tl.store(x_TxT + rows * T + columns, values.to(x_TxT.dtype.element_ty), mask=(rows < T) & (columns < T))


@triton.jit
def _powers(scores: tl.tensor, most: tl.tensor) -> tl.tensor:
    """Exponentials of scores less each query's largest one; 0 for one that sees nothing."""
    return tl.exp(scores - tl.where(most == float("-inf"), 0.0, most)[:, None])


@triton.jit
def _share(powers: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Of each query's sum."""
    if powers.dtype == tl.float32:
        return tl.div_rn(powers, tl.broadcast_to(total[:, None], powers.shape))
    return powers / total[:, None]


@triton.jit
def _shares(
    scores: tl.tensor,
    dmixed: tl.tensor,
    v_TxD: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    line: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Shares of a tile, and their gradient; a line of `dmixed` is so long."""
    dshares = _product(dmixed, v_TxD, left, right, T, D, line, M, N, WIDE, FORM, STATE)
    return _share(_powers(scores, most), total), dshares.to(v_TxD.dtype.element_ty).to(STATE)


def store_scores(
    q_GxTxD: tl.tensor,
    k_GxTxD: tl.tensor,
    scores_GxTxT: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> None:
    """The scores of a tile of queries with all keys."""
    group, left = tl.program_id(0).to(tl.int64), tl.program_id(1) * QUERIES
    q, k, scores = q_GxTxD + group * T * D, k_GxTxD + group * T * D, scores_GxTxT + group * T * T
    for right in range(0, T, KEYS):
        some = _scores(q, k, scores, False, left, right, T, D, SCALE, QUERIES, KEYS, WIDE, FORM, STATE)
        _keep_tile(scores, some, left, right, T, QUERIES, KEYS)


def attend(
    q_GxTxD: tl.tensor,
    k_GxTxD: tl.tensor,
    v_GxTxD: tl.tensor,
    scores_GxTxT: tl.tensor,
    mixed: tl.tensor,
    largest_GxT: tl.tensor,
    total_GxT: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    H: tl.tensor,
    what: tl.tensor,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> None:
    """What a tile of queries mixes of the values; each query's largest score, and the sum of its exponentials.

    If only SHARES are asked for, scores are read, and q and k are not. A score that is NaN is the largest.
    """
    group, left = tl.program_id(0).to(tl.int64), tl.program_id(1) * QUERIES
    q, k, v = q_GxTxD + group * T * D, k_GxTxD + group * T * D, v_GxTxD + group * T * D
    scores = scores_GxTxT + group * T * T
    end = T if what == SHARES else tl.minimum(T, left + QUERIES)
    most, total = tl.full([QUERIES], float("-inf"), STATE), tl.zeros([QUERIES], STATE)
    has_nan = tl.zeros([QUERIES], tl.int32)
    for right in range(0, end, KEYS):
        some = _scores(q, k, scores, what == SHARES, left, right, T, D, SCALE, QUERIES, KEYS, WIDE, FORM, STATE)
        has_nan = tl.maximum(has_nan, tl.max((some != some).to(tl.int32), 1))
        now = tl.maximum(most, tl.max(some, 1))
        kept = tl.where(most == now, 1.0, tl.exp(most - tl.where(now == float("-inf"), 0.0, now)))
        total, most = total * kept + tl.sum(_powers(some, now), 1), now
    mixture = tl.zeros([QUERIES, WIDE], STATE)
    for right in range(0, end, KEYS):
        some = _scores(q, k, scores, what == SHARES, left, right, T, D, SCALE, QUERIES, KEYS, WIDE, FORM, STATE)
        shares = _share(_powers(some, most), total).to(v.dtype.element_ty)
        values = _lines(v, right, T, D, D, KEYS, WIDE)
        mixture = tl.dot(shares, values, mixture, input_precision=FORM, out_dtype=STATE)
    _keep(mixed + _before(group, T, H, D), mixture, left, T, D, H * D, QUERIES, WIDE)
    rows = left + tl.arange(0, QUERIES)
    tl.store(largest_GxT + group * T + rows, tl.where(has_nan > 0, float("nan"), most), mask=rows < T)
    tl.store(total_GxT + group * T + rows, total, mask=rows < T)


def attend_back_queries(
    dmixed: tl.tensor,
    mixed: tl.tensor,
    q_GxTxD: tl.tensor,
    k_GxTxD: tl.tensor,
    v_GxTxD: tl.tensor,
    scores_GxTxT: tl.tensor,
    largest_GxT: tl.tensor,
    total_GxT: tl.tensor,
    along_GxT: tl.tensor,
    dscores_GxTxT: tl.tensor,
    dq_GxTxD: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    H: tl.tensor,
    what: tl.tensor,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> None:
    """The gradient of a tile of queries, and the sums `along` for `attend_back_keys`.

    With ALL in one go. With SHARES scores are given, and their gradient is left; with SCORES that is given, and the
    gradient of the queries is left.
    """
    group, left = tl.program_id(0).to(tl.int64), tl.program_id(1) * QUERIES
    q, k, v, head = q_GxTxD + group * T * D, k_GxTxD + group * T * D, v_GxTxD + group * T * D, _before(group, T, H, D)
    scores, dscores = scores_GxTxT + group * T * T, dscores_GxTxT + group * T * T
    rows = left + tl.arange(0, QUERIES)
    end = tl.minimum(T, left + QUERIES) if what == ALL else T
    most, total, along = tl.zeros([QUERIES], STATE), tl.zeros([QUERIES], STATE), tl.zeros([QUERIES], STATE)
    if what != SCORES:
        most = tl.load(largest_GxT + group * T + rows, mask=rows < T, other=0.0)
        total = tl.load(total_GxT + group * T + rows, mask=rows < T, other=1.0)
        if q.dtype.element_ty == STATE:
            arrived = _lines(dmixed + head, left, T, D, H * D, QUERIES, WIDE)
            along = tl.sum(arrived * _lines(mixed + head, left, T, D, H * D, QUERIES, WIDE), 1)
        else:  # `mixed` is rounded, and gradients of shares are, which add up to nothing where there is one share
            for right in range(0, end, KEYS):
                some = _scores(q, k, scores, what == SHARES, left, right, T, D, SCALE, QUERIES, KEYS, WIDE, FORM, STATE)
                shares, dshares = _shares(
                    some, dmixed + head, v, left, right, most, total, T, D, H * D, QUERIES, KEYS, WIDE, FORM, STATE
                )
                along += tl.sum(shares * dshares, 1)
        tl.store(along_GxT + group * T + rows, along, mask=rows < T)
    gradient = tl.zeros([QUERIES, WIDE], STATE)
    for right in range(0, end, KEYS):
        if what == SCORES:
            slopes = _tile(dscores, left, right, T, QUERIES, KEYS)
        else:
            some = _scores(q, k, scores, what == SHARES, left, right, T, D, SCALE, QUERIES, KEYS, WIDE, FORM, STATE)
            shares, dshares = _shares(
                some, dmixed + head, v, left, right, most, total, T, D, H * D, QUERIES, KEYS, WIDE, FORM, STATE
            )
            slopes = (shares * (dshares - along[:, None])).to(q.dtype.element_ty)
        if what == SHARES:
            _keep_tile(dscores, slopes, left, right, T, QUERIES, KEYS)
        else:
            keys = _lines(k, right, T, D, D, KEYS, WIDE)
            gradient = tl.dot(slopes, keys, gradient, input_precision=FORM, out_dtype=STATE)
    if what != SHARES:
        gradient = gradient * tl.full([1, 1], SCALE, STATE)
        _keep(dq_GxTxD + group * T * D, gradient, left, T, D, D, QUERIES, WIDE)


def attend_back_keys(
    dmixed: tl.tensor,
    q_GxTxD: tl.tensor,
    k_GxTxD: tl.tensor,
    v_GxTxD: tl.tensor,
    scores_GxTxT: tl.tensor,
    largest_GxT: tl.tensor,
    total_GxT: tl.tensor,
    along_GxT: tl.tensor,
    dscores_GxTxT: tl.tensor,
    dk_GxTxD: tl.tensor,
    dv_GxTxD: tl.tensor,
    T: tl.tensor,
    D: tl.tensor,
    H: tl.tensor,
    what: tl.tensor,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    FORM: tl.constexpr,
    STATE: tl.constexpr,
) -> None:
    """The gradients of a tile of keys and values, after `attend_back_queries`.

    With ALL of both. With SHARES scores are given, and the gradient of the values is left; with SCORES their gradient
    is given, and that of the keys is left.
    """
    group, right = tl.program_id(0).to(tl.int64), tl.program_id(1) * KEYS
    q, k, v, head = q_GxTxD + group * T * D, k_GxTxD + group * T * D, v_GxTxD + group * T * D, _before(group, T, H, D)
    scores, dscores = scores_GxTxT + group * T * T, dscores_GxTxT + group * T * T
    begin = right // QUERIES * QUERIES if what == ALL else 0
    dkeys, dvalues = tl.zeros([KEYS, WIDE], STATE), tl.zeros([KEYS, WIDE], STATE)
    for left in range(begin, T, QUERIES):
        if what == SCORES:
            slopes = _tile(dscores, left, right, T, QUERIES, KEYS)
        else:
            rows = left + tl.arange(0, QUERIES)
            most = tl.load(largest_GxT + group * T + rows, mask=rows < T, other=0.0)
            total = tl.load(total_GxT + group * T + rows, mask=rows < T, other=1.0)
            along = tl.load(along_GxT + group * T + rows, mask=rows < T, other=0.0)
            some = _scores(q, k, scores, what == SHARES, left, right, T, D, SCALE, QUERIES, KEYS, WIDE, FORM, STATE)
            shares, dshares = _shares(
                some, dmixed + head, v, left, right, most, total, T, D, H * D, QUERIES, KEYS, WIDE, FORM, STATE
            )
            slopes = (shares * (dshares - along[:, None])).to(q.dtype.element_ty)
            arrived = _lines(dmixed + head, left, T, D, H * D, QUERIES, WIDE)
            dvalues = tl.dot(
                tl.trans(shares.to(v.dtype.element_ty)), arrived, dvalues, input_precision=FORM, out_dtype=STATE
            )
        if what != SHARES:
            queries = _lines(q, left, T, D, D, QUERIES, WIDE)
            dkeys = tl.dot(tl.trans(slopes), queries, dkeys, input_precision=FORM, out_dtype=STATE)
    if what != SHARES:
        dkeys = dkeys * tl.full([1, 1], SCALE, STATE)
        _keep(dk_GxTxD + group * T * D, dkeys, right, T, D, D, KEYS, WIDE)
    if what != SCORES:
        _keep(dv_GxTxD + group * T * D, dvalues, right, T, D, D, KEYS, WIDE)
