"""The programs as operators of torch, which know what they change, trace on `meta`, and can be captured in a graph.

Every argument is an array on the device, or a number that the pack's structure fixes: a step copies nothing from the
host and looks at nothing. Arrays are contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.kernels.blocks import Blocks
from harness.kernels.launch import launch

CHUNK = 256  # of what is summed over another dim than the last one: so many make one partial sum
PARTS, COLUMNS = 16, 64  # of them at a time


def adamw(
    arrays: tuple[Tensor, Tensor, Tensor, Tensor],
    active_R: Tensor,
    rate_R: Tensor,
    short: tuple[Tensor, Tensor],
    betas: tuple[Tensor, Tensor],
    epsilon_R: Tensor,
    decay_RxG: Tensor,
    multipliers_Gx2: Tensor,
    blocks: Blocks,
    measure: bool,
) -> Tensor | None:
    """One step of AdamW for all active rows, in place; `arrays` [R, P]: weights, gradients, first and second moment.

    The rate [R] has the arrays' precision; `short` (1 - beta^count) and the other numbers, [R] each, are float64. The
    columns of a group, by its number in the blocks, have one decay, and one pair of multipliers: of the rate and of
    epsilon. Columns of no block stay as they are. Returns the sums of squares, [R, 3], float64, of what stands after
    the step, if asked to: weights, second moment, and the change of the weights. The blocks are those of one sum.
    """
    numbers = (active_R, rate_R, *short, *betas, epsilon_R, decay_RxG, multipliers_Gx2)
    partial = torch.ops.stability_harness.adamw(*arrays, *numbers, blocks.table, blocks.is_whole, measure)
    return _added(partial, blocks).squeeze(-1) if measure else None


def square_sums(values_RxP: Tensor, blocks: Blocks) -> Tensor:
    """The sums of squares of each row, [R, S], float64."""
    return power_sums(values_RxP, blocks, 2)


def power_sums(values_RxP: Tensor, blocks: Blocks, power: int) -> Tensor:
    """The sums of a power, of 1 to 4, of each row, [R, S], float64."""
    partial = torch.ops.stability_harness.powers(values_RxP, blocks.table, blocks.is_whole, power)
    return partial if blocks.count == 1 else _added(partial, blocks)


def column_sums(x_GxNxD: Tensor) -> Tensor:
    """The sums over N, [G, D], in the type of `x`. They go by way of some of `CHUNK` each, in float64."""
    partial = x_GxNxD
    while partial is x_GxNxD or partial.shape[1] > 1:
        partial = torch.ops.stability_harness.add_columns(partial)
    return partial[:, 0].to(x_GxNxD.dtype)


def scale(values_RxP: Tensor, factors_RxG: Tensor, blocks: Blocks) -> None:
    """Multiply each row in place by the factors of its groups, in the precision of the values."""
    torch.ops.stability_harness.scale(values_RxP, factors_RxG, blocks.table, blocks.is_whole)


def _added(partial: Tensor, blocks: Blocks) -> Tensor:
    """The sums of partial ones, [..., N] to [..., S]."""
    sums: Tensor = torch.ops.stability_harness.add_up(partial, blocks.firsts)
    return sums


# --- what torch calls, and what it is told of it on `meta` ---------------------------------------------------------


@torch.library.custom_op("stability_harness::adamw", mutates_args=("weights", "first", "second"))
def _adamw(
    weights: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    active: Tensor,
    rate: Tensor,
    short1: Tensor,
    short2: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    epsilon: Tensor,
    decay: Tensor,
    multipliers: Tensor,
    table: Tensor,
    is_whole: bool,
    measure: bool,
) -> Tensor:
    partial = _adamw_partial(weights, table, measure)
    numbers = (active, rate, short1, short2, beta1, beta2, epsilon, decay, multipliers)
    sizes = (weights.shape[1], table.shape[1], decay.shape[1])
    arrays = (weights, gradients, first, second, partial, *numbers, table)
    launch("adamw", (len(weights) * table.shape[1],), *arrays, *sizes, IS_WHOLE=is_whole, MEASURE=measure)
    return partial


def _adamw_partial(weights: Tensor, table: Tensor, measure: bool) -> Tensor:
    return weights.new_empty(len(weights), 3, table.shape[1] if measure else 0, dtype=torch.float64)


@_adamw.register_fake
def _(weights: Tensor, *others: Any) -> Tensor:
    *_, table, _, measure = others
    return _adamw_partial(weights, table, measure)


@torch.library.custom_op("stability_harness::powers", mutates_args=())
def _powers(values: Tensor, table: Tensor, is_whole: bool, power: int) -> Tensor:
    partial: Tensor = _powers_empty(values, table, is_whole, power)
    sizes, constants = (values.shape[1], table.shape[1]), {"IS_WHOLE": is_whole, "POWER": power}
    launch("powers", (len(values) * table.shape[1],), values, partial, table, *sizes, **constants)
    return partial


@_powers.register_fake
def _powers_empty(values: Tensor, table: Tensor, is_whole: bool, power: int) -> Tensor:
    return values.new_empty(len(values), table.shape[1], dtype=torch.float64)


@torch.library.custom_op("stability_harness::add_columns", mutates_args=())
def _add_columns(x: Tensor) -> Tensor:
    partial: Tensor = _add_columns_empty(x)
    groups, length, features = x.shape
    constants = {"CHUNK": CHUNK, "PARTS": PARTS, "COLUMNS": COLUMNS}
    grid = (groups * partial.shape[1], -(-features // COLUMNS))
    launch("add_columns", grid, x, partial, length, features, partial.shape[1], **constants)
    return partial


@_add_columns.register_fake
def _add_columns_empty(x: Tensor) -> Tensor:
    groups, length, features = x.shape
    return x.new_empty(groups, max(1, -(-length // CHUNK)), features, dtype=torch.float64)


@torch.library.custom_op("stability_harness::add_up", mutates_args=())
def _add_up(partial: Tensor, firsts: Tensor) -> Tensor:
    sums = partial.new_empty(*partial.shape[:-1], len(firsts) - 1)
    grid = (partial.shape[:-1].numel() * (len(firsts) - 1),)
    launch("add_up", grid, partial, sums, firsts, partial.shape[-1], len(firsts) - 1)
    return sums


@_add_up.register_fake
def _(partial: Tensor, firsts: Tensor) -> Tensor:
    return partial.new_empty(*partial.shape[:-1], len(firsts) - 1)


@torch.library.custom_op("stability_harness::scale", mutates_args=("values",))
def _scale(values: Tensor, factors: Tensor, table: Tensor, is_whole: bool) -> None:
    sizes = (values.shape[1], table.shape[1], factors.shape[1])
    launch("scale", (len(values) * table.shape[1],), values, factors, table, *sizes, IS_WHOLE=is_whole)


@_scale.register_fake
def _(values: Tensor, factors: Tensor, table: Tensor, is_whole: bool) -> None:
    pass
