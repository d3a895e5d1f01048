"""Cross-entropy as Triton reads it: one token's logits, `COLUMNS` of them at a time.

Exponentials and sums are those of `STATE`, the type of the logits. Each token's are its own, in one order.
"""

from __future__ import annotations

import triton.language as tl


def log_likelihood(
    logits_NxV: tl.tensor,
    targets_N: tl.tensor,
    found_N: tl.tensor,
    log_z_N: tl.tensor,
    V: tl.tensor,
    COLUMNS: tl.constexpr,
    STATE: tl.constexpr,
) -> None:
    """The logarithm of the sum of exponentials, and what the target's logit is above it; NaN where any logit is."""
    token = tl.program_id(0).to(tl.int64)
    logits = logits_NxV + token * V
    most, total = tl.full([COLUMNS], float("-inf"), STATE), tl.zeros([COLUMNS], STATE)
    for left in range(0, V, COLUMNS):
        columns = left + tl.arange(0, COLUMNS)
        some = tl.load(logits + columns, mask=columns < V, other=float("-inf"))
        now = tl.maximum(most, some)
        base = tl.where(now == float("-inf"), 0.0, now)
        total, most = total * tl.exp(most - base) + tl.exp(some - base), now
    largest = tl.max(most, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    log_z = base + tl.log(tl.sum(total * tl.exp(most - base), 0))
    tl.store(log_z_N + token, log_z)
    tl.store(found_N + token, tl.load(logits + tl.load(targets_N + token)) - log_z)


def likelihood_back(
    logits_NxV: tl.tensor,
    targets_N: tl.tensor,
    log_z_N: tl.tensor,
    share_N: tl.tensor,
    each_N: tl.tensor,
    V: tl.tensor,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    """In place of the logits: (share x p - 1 for the target) x each. With MASKED nothing where `each` is 0."""
    token = tl.program_id(0).to(tl.int64)
    logits, target = logits_NxV + token * V, tl.load(targets_N + token)
    log_z, share, each = tl.load(log_z_N + token), tl.load(share_N + token), tl.load(each_N + token)
    for left in range(0, V, COLUMNS):
        columns = left + tl.arange(0, COLUMNS)
        here = columns < V
        p = tl.exp(tl.load(logits + columns, mask=here, other=0.0) - log_z)
        gradient = tl.where(columns == target, (p * share - 1.0) * each, p * (share * each))
        if MASKED:
            gradient = tl.where(each == 0.0, 0.0, gradient)
        tl.store(logits + columns, gradient, mask=here)
