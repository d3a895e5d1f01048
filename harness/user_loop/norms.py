"""Norms of the tensors of the user's loop, of whatever layout and number format."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, sqrt

import torch
from torch import Tensor

from harness.model.formats import to_measure
from harness.optim.clipping import SAFE

SMALL = 2**14  # numbers whose squares are added up in float32 at once
PIECE = 2**12  # of more numbers, so many at a time
Norm = Tensor | float  # a number on a CPU, and on the device elsewhere


def joined(tensors: Sequence[Tensor], device: torch.device) -> Norm:
    """The L2 norm of all together, float64; finite exactly if every element is. On a CPU a number.

    The squares of float32 overflow at 2e19, so on a CPU a norm that is not well inside the range is taken once more in
    float64; elsewhere looking would cost more than taking it so at once.
    """
    return joined_each([tensors], device)[0]


def joined_each(groups: Sequence[Sequence[Tensor]], device: torch.device) -> list[Norm]:
    """`joined` of each of these, in one call."""
    if device.type == "cpu":
        return [_length(group) for group in groups]
    each = stacked(_norms([x for group in groups for x in group]), device)
    return [torch.linalg.vector_norm(part) for part in each.split([len(group) for group in groups])]


def _length(tensors: Sequence[Tensor]) -> float:
    """On a CPU."""
    norm = sqrt(sum(map(_square, tensors)))
    if tensors and not SAFE[0] < norm < SAFE[1]:
        return hypot(*map(float, _norms(tensors)))
    return norm


def _square(x: Tensor) -> float:
    """The sum of squares. torch's own norm of 50 million numbers in float32 was seen to be off by 0.4% to 2%."""
    flat = _measurable(x).reshape(-1)
    if flat.element_size() < 4:
        flat = flat.float()
    if not flat.is_contiguous():  # their squares are added up in another order, and less exactly
        flat = flat.contiguous()
    if flat.numel() <= SMALL:
        return float(torch.dot(flat, flat))
    rows, rest = flat.split([flat.numel() // PIECE * PIECE, flat.numel() % PIECE])
    pieces = rows.view(-1, 1, PIECE)
    return float(torch.bmm(pieces, pieces.mT).sum(dtype=torch.float64)) + float(torch.dot(rest, rest))


def _measurable(x: Tensor) -> Tensor:
    """Its real numbers, or those that a sparse one has."""
    dense = x.coalesce().values() if x.layout == torch.sparse_coo else x
    return dense if dense.dtype in (torch.float32, torch.float64) else to_measure(dense)


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The L2 norm of each, computed in float64."""
    return torch._foreach_norm([_measurable(x) for x in tensors], 2, dtype=torch.float64) if tensors else []


def stacked(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalars as one tensor, float64."""
    if not numbers:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if len({(x.dtype, x.device) for x in numbers}) == 1:
        return torch.stack(list(numbers)).to(device, torch.float64)
    return torch.stack([x.to(device, torch.float64) for x in numbers])
