"""Sums over a part of each trial's numbers, whose order is the same however many trials a pack has.

On a GPU torch cuts a sum by how many results there are, so that a trial's bits would go by the size of its pack. There
a program of Triton adds, which is told nothing of R, or, where there is none, one half is added to the other again and
again. On a CPU, where each result is summed by itself, sums are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.kernels.blocks import cut
from harness.kernels.operators import column_sums, power_sums
from harness.kernels.use import are_used


def total(x_Rxxx: Tensor, dim: int = -1) -> Tensor:
    """The sum over a dim that is not the first, in the type of `x`."""
    if on_cpu(x_Rxxx):
        return x_Rxxx.sum(dim)
    dim %= x_Rxxx.dim()
    if not are_used(x_Rxxx.device):
        wide = torch.promote_types(x_Rxxx.dtype, torch.float32)
        return halved(x_Rxxx.to(wide), dim).to(x_Rxxx.dtype)
    shape = x_Rxxx.shape
    if dim == x_Rxxx.dim() - 1:
        return powers(x_Rxxx.reshape(-1, shape[-1])).view(shape[:-1]).to(x_Rxxx.dtype)
    flat = x_Rxxx.reshape(shape[:dim].numel(), shape[dim], shape[dim + 1 :].numel()).contiguous()
    return column_sums(flat).view(*shape[:dim], *shape[dim + 1 :])


def total_into(target: Tensor, x_Rxxx: Tensor, dim: int) -> None:
    """`total`, left in `target`, which may be a part of a larger array."""
    if on_cpu(x_Rxxx):
        torch.sum(x_Rxxx, dim, out=target)
    else:
        target.copy_(total(x_Rxxx, dim))


def mean(x_Rxxx: Tensor, dim: int = -1) -> Tensor:
    """The mean over a dim that is not the first, in the type of `x`."""
    return x_Rxxx.mean(dim) if on_cpu(x_Rxxx) else total(x_Rxxx, dim).div_(x_Rxxx.shape[dim])


def nan_total(x_Rxxx: Tensor) -> Tensor:
    """The sum over the last dim of what is not NaN."""
    return x_Rxxx.nansum(-1) if on_cpu(x_Rxxx) else total(torch.where(x_Rxxx.isnan(), 0.0, x_Rxxx))


def std(x_Rxn: Tensor) -> Tensor:
    """The sample standard deviation (n - 1) of each row, [R]."""
    if on_cpu(x_Rxn):
        return x_Rxn.std(1)
    return (total((x_Rxn - mean(x_Rxn)[:, None]).square_()) / (x_Rxn.shape[1] - 1)).sqrt_()


def norm(x_Rxn: Tensor) -> Tensor:
    """The L2 norm of each row, [R], in the type of `x`."""
    return torch.linalg.vector_norm(x_Rxn, dim=1) if on_cpu(x_Rxn) else powers(x_Rxn, 2).sqrt_().to(x_Rxn.dtype)


def powers(x_Rxn: Tensor, power: int = 1) -> Tensor:
    """The sum of powers, of 1 to 4, of each row, [R], float64; not on a CPU."""
    if not are_used(x_Rxn.device):
        x_Rxn = x_Rxn.double()
        return halved(x_Rxn if power == 1 else x_Rxn**power, 1)
    columns = x_Rxn.shape[1]
    return power_sums(x_Rxn.contiguous(), cut([(0, columns)], columns, x_Rxn.device), power)[:, 0]


def root_of_squares(norms: Sequence[Tensor]) -> Tensor:
    """The L2 norm of the whole, [R], float64, from those of its parts."""
    if on_cpu(norms[0]):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0, dtype=torch.float64)
        return norm
    if len(norms) == 1:
        return norms[0].double()
    squares = norms[0].double().square()
    for part in norms[1:]:
        squares = squares + part.double().square()
    return squares.sqrt_()


def mean_of(parts: Sequence[Tensor]) -> Tensor:
    """The mean of some arrays of one shape, [R, ...], element by element."""
    if on_cpu(parts[0]):
        return torch.stack(list(parts)).mean(0)
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    return added / len(parts)


def halved(x_Rxxx: Tensor, dim: int) -> Tensor:
    """The sum over a dim: one half is added to the other until one number is left, and what is odd then joins in."""
    if not x_Rxxx.shape[dim]:
        return x_Rxxx.sum(dim)
    while (length := x_Rxxx.shape[dim]) > 1:
        half = length // 2
        added = x_Rxxx.narrow(dim, 0, half) + x_Rxxx.narrow(dim, half, half)
        x_Rxxx = torch.cat((added, x_Rxxx.narrow(dim, length - 1, 1)), dim) if length % 2 else added
    return x_Rxxx.squeeze(dim)
