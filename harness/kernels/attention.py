"""Causal attention by Triton's programs, as operators of torch: scores, their softmax and what it mixes in one pass.

Where scores are to be seen or changed on their way, the same is done in two steps, by the same arithmetic on the same
tiles: `scores` leaves them, and `mixed_by` reads them. What is rounded, and where, is as in torch's own operations:
scores, shares and their gradients have the type of q, k and v, and exponentials and sums are float32 or float64.

q, k, v: [R, B, H, T, D], contiguous, of one type; what they are mixed to: [R, B, T, H, D]. D is at most `WIDEST`. No
program is told anything of R, B or H but where a head lies, so bits of a trial depend on nothing but the trial.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.kernels.asked import ALL, SCORES, SHARES
from harness.kernels.launch import launch

WIDEST = 128  # features of a head: more do not fit into registers
TILE = 32  # queries, and keys, of a tile, where there are as many; never a function of R
WARPS = {16: 2, 32: 4, 64: 8, 128: 8}  # of 32 threads each, by features of a head: so that registers are enough
STAGES = 1  # tiles that are loaded at a time


class Mixed(NamedTuple):
    """What queries mix of the values; of each, [R, B, H, T], its largest score and the sum of its exponentials."""

    mixed: Tensor
    largest: Tensor
    total: Tensor


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float, tf32: bool = False) -> Mixed:
    """softmax(scale q k^T + causal mask) v. A score that is NaN is the largest."""
    return Mixed(*torch.ops.stability_harness.attended(q, k, v, scale, tf32))


def attended_backward(
    dmixed: Tensor, found: Mixed, q: Tensor, k: Tensor, v: Tensor, scale: float, tf32: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.stability_harness.attended_backward(
        dmixed, *found, q, k, v, scale, tf32
    )
    return gradients


def scores(q: Tensor, k: Tensor, scale: float, tf32: bool = False) -> Tensor:
    """What the softmax reads, [R, B, H, T, T], with -inf where a query does not see the key."""
    scores: Tensor = torch.ops.stability_harness.scores(q, k, scale, tf32)
    return scores


def scores_backward(dscores: Tensor, q: Tensor, k: Tensor, scale: float, tf32: bool = False) -> tuple[Tensor, Tensor]:
    """Gradients of q and k."""
    gradients: tuple[Tensor, Tensor] = torch.ops.stability_harness.scores_backward(dscores, q, k, scale, tf32)
    return gradients


def mixed_by(scores: Tensor, v: Tensor, scale: float, tf32: bool = False) -> Mixed:
    """softmax(scores) v, whatever the scores are; `scale` is that of the program that would have computed them."""
    return Mixed(*torch.ops.stability_harness.mixed_by(scores, v, scale, tf32))


def mixed_by_backward(
    dmixed: Tensor, found: Mixed, scores: Tensor, v: Tensor, scale: float, tf32: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of the scores and of v."""
    gradients: tuple[Tensor, Tensor] = torch.ops.stability_harness.mixed_by_backward(
        dmixed, *found, scores, v, scale, tf32
    )
    return gradients


# --- what torch calls, and what it is told of it on `meta` ---------------------------------------------------------


def _state(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _new_mixed(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    *many, heads, context, features = v.shape
    largest, total = (v.new_empty(v.shape[:-1], dtype=_state(v)) for _ in range(2))
    return v.new_empty(*many, context, heads, features), largest, total


def _new_scores(q: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:-1], q.shape[-2])


@torch.library.custom_op("stability_harness::attended", mutates_args=())
def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    found = _new_mixed(v)
    _launch("attend", v, tf32, q, k, v, q, *found, *_sizes(v), ALL, SCALE=scale)
    return found


@_attended.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _new_mixed(v)


@torch.library.custom_op("stability_harness::mixed_by", mutates_args=())
def _mixed_by(scores: Tensor, v: Tensor, scale: float, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    found = _new_mixed(v)
    _launch("attend", v, tf32, v, v, v, scores, *found, *_sizes(v), SHARES, SCALE=scale)
    return found


@_mixed_by.register_fake
def _(scores: Tensor, v: Tensor, scale: float, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _new_mixed(v)


@torch.library.custom_op("stability_harness::scores", mutates_args=())
def _scores(q: Tensor, k: Tensor, scale: float, tf32: bool) -> Tensor:
    found = _new_scores(q)
    _launch("store_scores", q, tf32, q, k, found, *_sizes(q)[:2], SCALE=scale)
    return found


@_scores.register_fake
def _(q: Tensor, k: Tensor, scale: float, tf32: bool) -> Tensor:
    return _new_scores(q)


@torch.library.custom_op("stability_harness::attended_backward", mutates_args=())
def _attended_backward(
    dmixed: Tensor,
    mixed: Tensor,
    largest: Tensor,
    total: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `q`, `k` and `v`, in their shapes, from that of what attention gave, `dmixed`.

    `mixed`, and `largest` and `total` of each row of scores, are what the forward pass has left.
    """
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    _backward(ALL, v, tf32, (dmixed, mixed), (q, k), q, (largest, total), q, (dq, dk, dv), scale)
    return dq, dk, dv


@_attended_backward.register_fake
def _(dmixed: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, largest, _, q, k, v, *_ = others
    torch.empty_like(largest)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@torch.library.custom_op("stability_harness::mixed_by_backward", mutates_args=())
def _mixed_by_backward(
    dmixed: Tensor, mixed: Tensor, largest: Tensor, total: Tensor, scores: Tensor, v: Tensor, scale: float, tf32: bool
) -> tuple[Tensor, Tensor]:
    dscores, dv = torch.empty_like(scores), torch.empty_like(v)
    _backward(SHARES, v, tf32, (dmixed, mixed), (v, v), scores, (largest, total), dscores, (v, v, dv), scale)
    return dscores, dv


@_mixed_by_backward.register_fake
def _(dmixed: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, largest, _, scores, v, *_ = others
    torch.empty_like(largest)
    return torch.empty_like(scores), torch.empty_like(v)


@torch.library.custom_op("stability_harness::scores_backward", mutates_args=())
def _scores_backward(dscores: Tensor, q: Tensor, k: Tensor, scale: float, tf32: bool) -> tuple[Tensor, Tensor]:
    dq, dk, unread = torch.empty_like(q), torch.empty_like(k), q.new_empty(q.shape[:-1], dtype=_state(q))
    _backward(SCORES, q, tf32, (q, q), (q, k), q, (unread, unread), dscores, (dq, dk, q), scale)
    return dq, dk


@_scores_backward.register_fake
def _(dscores: Tensor, q: Tensor, k: Tensor, scale: float, tf32: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


# --- launches ------------------------------------------------------------------------------------------------------


def _backward(
    what: int,
    v: Tensor,
    tf32: bool,
    mixed: tuple[Tensor, Tensor],
    read: tuple[Tensor, Tensor],
    scores: Tensor,
    numbers: tuple[Tensor, Tensor],
    dscores: Tensor,
    left: tuple[Tensor, Tensor, Tensor],
    scale: float,
) -> None:
    """Both programs; what one of them has no use for is something else of the same type."""
    along = torch.empty_like(numbers[0])
    dq, dk, dv = left
    queries = (*mixed, *read, v, scores, *numbers, along, dscores, dq)
    _launch("attend_back_queries", v, tf32, *queries, *_sizes(v), what, SCALE=scale)
    keys = (mixed[0], *read, v, scores, *numbers, along, dscores, dk, dv)
    _launch("attend_back_keys", v, tf32, *keys, *_sizes(v), what, SCALE=scale)


def _sizes(v: Tensor) -> tuple[int, int, int]:
    heads, context, features = v.shape[-3:]
    return context, features, heads


def _launch(name: str, v: Tensor, tf32: bool, *arguments: Any, **constants: Any) -> None:
    """A program for each tile of each head."""
    import triton.language as tl

    context, features = v.shape[-2:]
    tile = max(16, min(TILE, 1 << (context - 1).bit_length()))
    grid = (v.shape[:-2].numel(), -(-context // tile))
    constants |= {"QUERIES": tile, "KEYS": tile, "WIDE": max(16, 1 << (features - 1).bit_length())}
    constants |= {"FORM": "tf32" if tf32 else "ieee", "STATE": getattr(tl, str(_state(v)).removeprefix("torch."))}
    launch(name, grid, *arguments, **constants, num_warps=WARPS[constants["WIDE"]], num_stages=STAGES)
