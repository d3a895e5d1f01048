"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import PER_TRIAL, number
from harness.config.limits import MOST_STEPS
from harness.model.products import product
from harness.model.tensors import ScaledTensor
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, is_matrix, options

LARGEST = 10_000  # longest side of a matrix that is rotated, as in the authors' code
FLOOR = 1e-30  # added to the diagonal before eigenvectors are looked for
SIDES = {"left": 0, "right": 1}  # by the dim of a matrix


@dataclass(frozen=True)
class Options:
    """`soap.*`."""

    every: int = number(PER_TRIAL, 10, "steps from one update of the eigenbases to the next", low=1, high=MOST_STEPS)


def _room(side: str) -> Callable[[ScaledTensor], int]:
    """Numbers of a square matrix as long as that side of a tensor, if it is rotated there."""

    def size(scaled: ScaledTensor) -> int:
        length = scaled.shape[SIDES[side]] if is_matrix(scaled) else 0
        return length * length if length <= LARGEST else 0

    return size


class SOAP(Adam):
    """Vyas et al. 2024 (arXiv 2409.11321), algorithm 3, with the defaults of their code.

    Means of G G^T and G^T G are kept of each matrix, with `optim.beta2`. Their eigenbases come from a decomposition
    at the first step, which moves nothing but by weight decay, and from a step of power iteration and a QR
    decomposition every `soap.every` steps. The first moment is kept as it is, and rotated for the step; the second
    is that of rotated gradients, so what a fault strikes in `moment_2` belongs to a direction and not to a weight.
    Vectors take Adam's steps, from the second on. Epsilon is added to the root of the second moment as it is, not
    as corrected. Not on a CPU, the host waits once a step, to know whose bases are due. No rule of muP is known for
    it: it takes AdamW's rates, under which what a step changes falls with the width in the first steps, where
    AdamW's does not (tests/harness/test_coordinate_check.py). Where gradients have not filled all directions of a
    matrix, which eigenvectors belong to zero is rounding: there other kernels give other steps.
    """

    tensor_slots: ClassVar[Mapping[str, Callable[[ScaledTensor], int]]] = {
        f"{side}_{what}": _room(side) for side in SIDES for what in ("gram", "basis")
    }
    per_tensor = True
    waits = True
    keeps_elementwise = False
    hyperparameters = {**Adam.hyperparameters, **options("soap", "every")}

    def numbers(self, h: Numbers) -> Numbers:
        taken = h["count"] - 1  # steps that have moved anything, with this one
        found = super().numbers({**h, "count": taken.clamp(min=1)})
        self._is_first, self._is_due = (_told(x[:, 0]) for x in (taken <= 0, taken.remainder(h["every"]) == 0))
        return {**found, "is_first": taken <= 0}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        gradients, sides = piece.gradients.unflatten(1, piece.shape), self._sides(piece)
        before = {name: piece.slots[name].clone() for name in self.slots}
        rotated = self._rotated(piece, gradients, sides)
        first = piece.slots["moment_1"].mul_(h["beta1"]).add_(piece.gradients * h["rest1"])
        second = piece.slots["moment_2"].mul_(h["beta2"]).add_((rotated * rotated).flatten(1).mul_(h["rest2"]))
        epsilon = h["eps"] * piece.segment.epsilon * h["scale2"]
        inside = self._rotated(piece, first.unflatten(1, piece.shape), sides).flatten(1)
        direction = (inside / second.sqrt().mul_(h["scale2"]).add_(epsilon)).mul_(h["scale1"])
        direction = self._rotated(piece, direction.unflatten(1, piece.shape), sides, back=True).flatten(1)
        for name, values in before.items():  # whose row only begins
            piece.slots[name].copy_(torch.where(h["is_first"], values, piece.slots[name]))
        for side in sides:
            of = gradients if side == "left" else gradients.mT
            gram = self._square(piece, side, "gram")
            gram.mul_(h["beta2"][..., None]).add_(product(of, of.mT).mul_(h["rest2"][..., None]))
        for place, row in enumerate(piece.rows):
            if self._is_first[row]:
                self._begin(piece, place, sides)
            elif self._is_due[row]:
                self._turn(piece, place, sides)
        return torch.where(h["is_first"], piece.gradients * 0.0, direction)  # what is not finite stays so

    def _sides(self, piece: Piece) -> Sequence[str]:
        """On which sides a tensor is rotated."""
        return [side for side in SIDES if piece.slots[f"{side}_gram"].shape[1]] if piece.is_matrix else []

    def _square(self, piece: Piece, side: str, what: str) -> Tensor:
        """[r, n, n]."""
        length = piece.shape[SIDES[side]]
        square: Tensor = piece.slots[f"{side}_{what}"].unflatten(1, (length, length))
        return square

    def _rotated(self, piece: Piece, x_rxmxn: Tensor, sides: Sequence[str], back: bool = False) -> Tensor:
        """left^T x right, or with `back` left x right^T."""
        x = x_rxmxn
        for side in sides:
            basis = self._square(piece, side, "basis")
            x = product(basis if back else basis.mT, x) if side == "left" else product(x, basis.mT if back else basis)
        return x

    def _begin(self, piece: Piece, place: int, sides: Sequence[str]) -> None:
        """The eigenvectors of a row's first gradients, largest eigenvalue first."""
        for side in sides:
            gram = self._square(piece, side, "gram")[place].clone()  # by itself, wherever it lies in memory
            self._square(piece, side, "basis")[place] = _eigenbasis(gram)

    def _turn(self, piece: Piece, place: int, sides: Sequence[str]) -> None:
        """One step of power iteration, in the order of what eigenvalues seem to be; the second moment follows."""
        second = piece.slots["moment_2"].unflatten(1, piece.shape)[place]
        for side in sides:
            gram, basis = (self._square(piece, side, what)[place] for what in ("gram", "basis"))
            moved = product(gram.clone()[None], basis.clone()[None])[0]
            order = (basis * moved).sum(0).argsort(descending=True, stable=True)
            second.copy_(second.index_select(SIDES[side], order))
            basis.copy_(torch.linalg.qr(moved.index_select(1, order)).Q)


def _told(where_R: Tensor) -> list[bool]:
    """For the host; of tensors without numbers, all."""
    return [True] * len(where_R) if where_R.device.type == "meta" else where_R.tolist()


def _eigenbasis(gram: Tensor) -> Tensor:
    """Eigenvectors as columns, the largest eigenvalue first, found in float64; the identity where there are none."""
    if gram.device.type == "meta":
        return gram
    wide = torch.where(gram.isfinite().all(), gram, 0.0).double()  # or the decomposition raises, for all rows
    wide.diagonal().add_(FLOOR)
    try:
        basis: Tensor = torch.linalg.eigh(wide).eigenvectors.flip(1).to(gram.dtype)
    except RuntimeError:  # torch's LinAlgError is one
        basis = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return basis
