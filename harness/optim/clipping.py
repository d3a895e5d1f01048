"""Gradient norms and clipping, per trial."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.kernels.blocks import Blocks, cut
from harness.kernels.operators import scale, square_sums
from harness.kernels.use import are_used
from harness.model.parameters import Layout
from harness.model.sums import powers, root_of_squares

CPU_COLUMNS = 65_536  # a piece of that many is summed at once; never a function of R
COLUMNS, PIECES = 65_536, 16  # elsewhere: a piece has so many, or this part of them; no function of R either
SAFE = (1e-12, 1e15)  # a float32 norm in this range has neither overflowed nor lost anything that counts
EPSILON = 1e-6  # what torch, ZClip and AdaGC add to a norm before they divide by it


def global_norm(gradients_RxP: Tensor) -> Tensor:
    """L2 norm over each trial's gradients, [R], float64; finite exactly if every element is.

    The squares of float32 overflow at 2e19, so a norm that is not well inside the range is taken again in float64. On
    a CPU that is seldom needed, and each trial's norm is chosen by itself; elsewhere looking would cost more.
    """
    if are_used(gradients_RxP.device):
        return square_sums(gradients_RxP, _all_columns(gradients_RxP)).sqrt_()[:, 0]
    return _norms([gradients_RxP])[:, 0]


def tensor_norms(gradients_RxP: Tensor, layout: Layout) -> Tensor:
    """L2 norm of each tensor of each trial, [R, tensors], float64, as `global_norm` takes it."""
    if are_used(gradients_RxP.device):
        return square_sums(gradients_RxP, _tensors(gradients_RxP, layout)).sqrt_()
    return _norms([gradients_RxP[:, span.start : span.stop] for span in layout.spans])


def _norms(gradients: list[Tensor]) -> Tensor:
    if not on_cpu(gradients[0]):
        return torch.stack([exact_norm(x) for x in gradients], dim=1)
    norms = torch.stack([_quick_norm(x) for x in gradients], dim=1).double()
    for row, number in (~((norms > SAFE[0]) & (norms < SAFE[1]))).nonzero().tolist():
        # By itself, so that how it is summed does not depend on how many trials there are; in pieces, to copy little.
        pieces = gradients[number][row].split(CPU_COLUMNS)
        norms[row, number] = root_of_squares([torch.linalg.vector_norm(piece.double()) for piece in pieces])
    return norms


def _quick_norm(gradients_Rxn: Tensor) -> Tensor:
    """As `global_norm` on a CPU, without a look at the range."""
    if gradients_Rxn.shape[1] <= CPU_COLUMNS:
        norm: Tensor = torch.linalg.vector_norm(gradients_Rxn, dim=1)
        return norm
    pieces = gradients_Rxn.split(CPU_COLUMNS, dim=1)
    return root_of_squares([torch.linalg.vector_norm(piece, dim=1) for piece in pieces])


def exact_norm(gradients_Rxn: Tensor) -> Tensor:
    """As `global_norm`, in float64, without a look. In pieces: torch makes a float64 copy of what it is given."""
    pieces = gradients_Rxn.split(max(COLUMNS, gradients_Rxn.shape[1] // PIECES), dim=1)
    if on_cpu(gradients_Rxn):
        return root_of_squares([torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64) for piece in pieces])
    return root_of_squares([powers(piece, 2).sqrt_() for piece in pieces])


def clipping_factor(norm: Tensor, limit: Tensor) -> Tensor:
    """min(1, limit / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_; NaN for a norm of NaN, and 1 for no limit.

    An infinite norm gives 0, which leaves what is infinite NaN.
    """
    return (limit / (norm + EPSILON)).clamp_(max=1.0).masked_fill_(limit == torch.inf, 1.0)


def scale_trials(gradients_RxP: Tensor, factor_R: Tensor, layout: Layout) -> None:
    """Multiply each trial's gradients in place. The columns between tensors stay zero whatever the factor is.

    On a CPU only trials whose factor is not one are passed over.
    """
    if not on_cpu(gradients_RxP):
        scale_tensors(gradients_RxP, factor_R[:, None].expand(-1, len(layout.spans)), layout)
        return
    factor_R = factor_R.to(gradients_RxP.dtype)
    for row in (factor_R != 1).nonzero().flatten().tolist():
        gradients_RxP[row].mul_(factor_R[row]).index_fill_(0, layout.padding, 0.0)


def scale_tensors(gradients_RxP: Tensor, factors: Tensor, layout: Layout) -> None:
    """Multiply each tensor of each trial in place by its own factor, [R, tensors].

    On a CPU only tensors for which some factor is not one are passed over.
    """
    factors, numbers = factors.to(gradients_RxP.dtype), list(range(len(layout.spans)))
    if are_used(gradients_RxP.device):
        scale(gradients_RxP, factors.contiguous(), _tensors(gradients_RxP, layout))
        return
    if on_cpu(gradients_RxP):
        numbers = (factors != 1).any(0).nonzero().flatten().tolist()
    for number in numbers:
        span = layout.spans[number]
        gradients_RxP[:, span.start : span.stop].mul_(factors[:, number, None])


def _all_columns(flat_RxP: Tensor) -> Blocks:
    return cut([(0, flat_RxP.shape[1])], flat_RxP.shape[1], flat_RxP.device)


def _tensors(flat_RxP: Tensor, layout: Layout) -> Blocks:
    """Each tensor by itself."""
    return cut([(span.start, span.stop) for span in layout.spans], layout.size, flat_RxP.device)
