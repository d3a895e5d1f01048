"""Heads of queries, keys and values, split, turned by their positions and joined again: operators of torch.

Neighbouring features (2i, 2i + 1) are a pair (a, b), which turns to (a cos - b sin, a sin + b cos): each product is
rounded, then the sum. `angles` [T, D, 2] of D pairs has cosines and sines, in the type that is computed in; what is
narrower is widened before, and rounded after. That gives the same bits whether heads turn while they are split or
later. Every argument is an array on the device, or a number that the pack's structure fixes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.kernels.launch import launch

TILE = 1024  # elements of each part that a program has, or one head where that is wider
TOGETHER = 3  # queries, keys and values


def split(qkv_RxNx3D: Tensor, context: int, heads: int, angles: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [R, B, H, T, D/H], of N = B x T tokens; queries and keys turned, if there are angles."""
    q, k, v = torch.ops.stability_harness.split_heads(qkv_RxNx3D.contiguous(), angles, context, heads)
    return q, k, v


def join(gradients: Sequence[Tensor], angles: Tensor | None = None) -> Tensor:
    """[R, N, 3D] of three times [R, B, H, T, D/H]; the first two turned back, if there are angles.

    All three may also lie as [R, B, T, H, D/H], as attention kernels leave their gradients; others are copied first.
    """
    if not _tokens_first(gradients):
        gradients = [gradient.contiguous() for gradient in gradients]
    joined: Tensor = torch.ops.stability_harness.join_heads(*gradients, angles)
    return joined


def turn(parts: Sequence[Tensor], angles: Tensor, back: bool = False) -> list[Tensor]:
    """One or two arrays of heads [R, B, H, T, D], turned, or turned back."""
    turned: list[Tensor] = torch.ops.stability_harness.turn_heads([part.contiguous() for part in parts], angles, back)
    return turned


def _tokens_first(parts: Sequence[Tensor]) -> bool:
    return all(part.transpose(2, 3).is_contiguous() and not part.is_contiguous() for part in parts)


def _launched(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    angles: Tensor | None,
    sizes: tuple[int, int, int, int],
    beside: tuple[int, int] = (0, 0),
    back: bool = False,
) -> None:
    """Launch the program for S sequences of T tokens of H heads of D features."""
    sequences, context, heads, head_dim = sizes
    columns = 1 << (head_dim - 1).bit_length()
    lines = max(1, TILE // columns)
    parts = max(len(sources), len(targets))
    turned = 0 if angles is None else min(parts, 2)
    arrays = [(*given, *[given[-1]] * TOGETHER)[:TOGETHER] for given in (sources, targets)]
    table = sources[0] if angles is None else angles
    launch(
        "heads",
        (sequences * -(-context * heads // lines),),
        *arrays[0],
        *arrays[1],
        table,
        context,
        H=heads,
        D=head_dim,
        LINES=lines,
        COLUMNS=columns,
        PARTS=parts,
        TURNED=turned,
        BACK=back,
        BESIDE_IN=beside[0],
        BESIDE_OUT=beside[1],
    )


# --- what torch calls, and what it is told of it on `meta` ---------------------------------------------------------


@torch.library.custom_op("stability_harness::split_heads", mutates_args=())
def _split(qkv: Tensor, angles: Tensor | None, context: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _split_ones(qkv, context, heads)
    sizes = (q.shape[0] * q.shape[1], context, heads, q.shape[-1])
    _launched([qkv], [q, k, v], angles, sizes, (TOGETHER, 0))
    return q, k, v


@_split.register_fake
def _split_fake(qkv: Tensor, angles: Tensor | None, context: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return _split_ones(qkv, context, heads)


def _split_ones(qkv: Tensor, context: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    trials, tokens, width = qkv.shape
    shape = (trials, tokens // context, heads, context, width // (TOGETHER * heads))
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


@torch.library.custom_op("stability_harness::join_heads", mutates_args=())
def _join(query: Tensor, key: Tensor, value: Tensor, angles: Tensor | None) -> Tensor:
    joined, parts, beside = _joined(query), [query, key, value], 0
    trials, batch, heads, context, head_dim = query.shape
    if _tokens_first(parts):
        parts, beside = [part.transpose(2, 3) for part in parts], 1
    _launched(parts, [joined], angles, (trials * batch, context, heads, head_dim), (beside, TOGETHER), back=True)
    return joined


@_join.register_fake
def _join_fake(query: Tensor, key: Tensor, value: Tensor, angles: Tensor | None) -> Tensor:
    return _joined(query)


def _joined(part: Tensor) -> Tensor:
    trials, batch, heads, context, head_dim = part.shape
    return part.new_empty(trials, batch * context, TOGETHER * heads * head_dim)


@torch.library.custom_op("stability_harness::turn_heads", mutates_args=())
def _turn(parts: list[Tensor], angles: Tensor, back: bool) -> list[Tensor]:
    turned = [torch.empty_like(part) for part in parts]
    *others, context, head_dim = parts[0].shape
    _launched(parts, turned, angles, (torch.Size(others).numel(), context, 1, head_dim), back=back)
    return turned


@_turn.register_fake
def _turn_fake(parts: list[Tensor], angles: Tensor, back: bool) -> list[Tensor]:
    return [torch.empty_like(part) for part in parts]
