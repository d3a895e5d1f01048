"""LayerNorm and RMSNorm of a pack, with gains of each row: two programs, and one that adds up the gains' gradients.

Shapes: R rows, any number of middle dims that make N tokens, D features. How tokens are cut depends on N and D alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.kernels.launch import launch

WIDEST = 16384  # features: a program holds all of a token's
TILE = 2048  # elements that a program holds at a time: more only if one token has more
FEWEST = 32  # tokens of a block, of which each leaves a sum for every feature
PARTS, COLUMNS = 64, 32  # of the sums of blocks, that are added at a time
VECTOR = 16  # bytes that a thread reads at once


def normed(x_RxxxD: Tensor, gain_RxD: Tensor, epsilon: float, is_layer: bool) -> tuple[Tensor, Tensor]:
    """LayerNorm, or else RMSNorm, of contiguous x times the gain, in the gain's type.

    Beside it what the backward pass needs with x: [R, 2, N] means and scales, or [R, 1, N] scales. D: up to `WIDEST`.
    """
    normed: tuple[Tensor, Tensor] = torch.ops.stability_harness.normed(x_RxxxD, gain_RxD, epsilon, is_layer)
    return normed


def normed_backward(
    dy_RxxxD: Tensor,
    x_RxxxD: Tensor,
    kept_RxSxN: Tensor,
    gain_RxD: Tensor,
    gradient_RxD: Tensor,
    beside_RxxxD: Tensor | None = None,
) -> Tensor:
    """The gradient of x, in its type, plus `beside`, if given: another gradient of x that adds to it.

    The gain's is written to `gradient`, whose rows may lie apart as a flat array's do.
    """
    operations = torch.ops.stability_harness
    dx: Tensor
    dx, partial = operations.normed_backward(dy_RxxxD, x_RxxxD, kept_RxSxN, gain_RxD, beside_RxxxD)
    operations.add_blocks(partial, gradient_RxD)
    return dx


def tile(features: int) -> dict[str, int]:
    """How a program holds tokens of so many features: how many, on how many columns, and by how many warps."""
    columns = max(16, 1 << (features - 1).bit_length())
    tokens = max(1, TILE // columns)
    return {"D": features, "TOKENS": tokens, "COLUMNS": columns, "num_warps": min(16, max(4, columns // 512))}


def block(features: int) -> int:
    """How many tokens make one partial sum of the gain's gradient."""
    return max(FEWEST, 2 * tile(features)["TOKENS"])


def _tokens(x_RxxxD: Tensor) -> int:
    return x_RxxxD.shape[1:-1].numel()


# Triton compiles one program for arrays and rows that start at whole vectors, and another for what does not. Which of
# them runs must depend neither on R nor on which rows pass: so all of them start there, if need be in a copy.


def _aligned(x: Tensor) -> Tensor:
    """Contiguous numbers that start at a whole vector."""
    return x.clone() if x.data_ptr() % VECTOR else x


def _starts_alike(x_RxD: Tensor) -> bool:
    is_near = x_RxD.stride(1) == 1 or x_RxD.shape[1] == 1
    return is_near and x_RxD.data_ptr() % VECTOR == 0 and (len(x_RxD) == 1 or x_RxD.stride(0) % VECTOR == 0)


def _apart(x_RxD: Tensor) -> Tensor:
    """An empty array of that shape, whose rows start alike."""
    return x_RxD.new_empty(len(x_RxD), -(-x_RxD.shape[1] // VECTOR) * VECTOR)[:, : x_RxD.shape[1]]


def _rows(x_RxD: Tensor) -> tuple[Tensor, int]:
    """All numbers from the first of the first row to the last of the last, and how far apart its rows start."""
    stride = x_RxD.stride(0) if len(x_RxD) > 1 else VECTOR  # of one row torch may say anything
    return x_RxD.as_strided(((len(x_RxD) - 1) * stride + x_RxD.shape[1],), (1,)), stride


# --- what torch calls, and what it is told of it on `meta` ---------------------------------------------------------


@torch.library.custom_op("stability_harness::normed", mutates_args=())
def _normed(x: Tensor, gain: Tensor, epsilon: float, is_layer: bool) -> tuple[Tensor, Tensor]:
    y, kept = _normed_empty(x, gain, epsilon, is_layer)
    gain, stride = _rows(gain if _starts_alike(gain) else _apart(gain).copy_(gain))
    sizes, tokens = tile(x.shape[-1]), _tokens(x)
    grid = (-(-tokens // sizes["TOKENS"]), len(x))
    launch("normed", grid, _aligned(x), gain, y, kept, tokens, stride, EPSILON=epsilon, IS_LAYER=is_layer, **sizes)
    return y, kept


@_normed.register_fake
def _normed_empty(x: Tensor, gain: Tensor, epsilon: float, is_layer: bool) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(gain.dtype, torch.float32)
    y = torch.empty(x.shape, dtype=gain.dtype, device=x.device)
    return y, x.new_empty(len(x), 2 if is_layer else 1, _tokens(x), dtype=exact)


@torch.library.custom_op("stability_harness::normed_backward", mutates_args=())
def _normed_backward(dy: Tensor, x: Tensor, kept: Tensor, gain: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor]:
    dx, partial = _normed_backward_empty(dy, x, kept)
    gain, stride = _rows(gain if _starts_alike(gain) else _apart(gain).copy_(gain))
    features, tokens, blocks = x.shape[-1], _tokens(x), partial.shape[1]
    dy, x = _aligned(dy), _aligned(x)
    arrays = (dy, x, kept, gain, dy if beside is None else _aligned(beside), dx, partial)
    constants = {"IS_LAYER": kept.shape[1] == 2, "HAS_BESIDE": beside is not None, "BLOCK": block(features)}
    launch("normed_backward", (blocks, len(x)), *arrays, tokens, blocks, stride, **constants, **tile(features))
    return dx, partial


@_normed_backward.register_fake
def _normed_backward_empty(dy: Tensor, x: Tensor, kept: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    features = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, kept.new_empty(len(x), -(-_tokens(x) // block(features)), features)


@torch.library.custom_op("stability_harness::add_blocks", mutates_args=("sums",))
def _add_blocks(partial: Tensor, sums: Tensor) -> None:
    count, blocks, features = partial.shape
    target = sums if _starts_alike(sums) else _apart(sums)
    flat, stride = _rows(target)
    grid = (-(-features // COLUMNS), count)
    launch("add_blocks", grid, partial, flat, blocks, features, stride, PARTS=PARTS, COLUMNS=COLUMNS)
    if target is not sums:
        sums.copy_(target)


@_add_blocks.register_fake
def _(partial: Tensor, sums: Tensor) -> None:
    pass
