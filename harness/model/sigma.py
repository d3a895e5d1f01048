"""Sigma-reparametrisation: hidden matrices divided by their spectral norm and times a learned number.

W_hat = gamma W / sigma(W) (Zhai et al. 2023, arXiv 2303.06296, section 3). sigma(W) = left . W right, with a pair of
unit vectors that one power iteration per training step keeps near those of the largest singular value; the gradient
takes them as constants. They start at the singular vectors of the initial matrix, and gamma at one, as in the paper
and its published code for speech; that for vision starts gamma at sigma(W), so that W_hat = W at first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model import sums
from harness.model.gradients import WithBackward, differentiable
from harness.model.layers import Leaf
from harness.model.parameters import Layout
from harness.model.products import product
from harness.model.state import Rows, State
from harness.model.tensors import MATRICES

SMALLEST_NORM = 1e-12  # a vector of zeros stays one


class SingularVectors:
    """A pair of unit vectors, [R, out] and [R, in], for each hidden matrix [R, out, in] of a pack.

    They are part of the pack's state: forked, restored and compared with it.
    """

    def __init__(self, layout: Layout, weights: Rows, state: State):
        self.layout, self._weights = layout, weights
        self._matrices = [scaled for scaled in layout.tensors if scaled.kind in MATRICES]
        self._starts, end = {}, 0
        for scaled in self._matrices:
            self._starts[scaled.name] = end
            end += sum(scaled.shape)
        flat = weights.used.new_empty(len(weights.used), end)
        for scaled in self._matrices:
            left, right = self._pair(flat, scaled.name)
            # One at a time: packs do not matter.
            for trial, matrix in enumerate(layout.view(weights.used, scaled.name)):
                u, _, v = torch.linalg.svd(matrix, full_matrices=False)
                left[trial], right[trial] = u[:, 0], v[0]
        self._vectors = state.add("singular_vectors", flat)

    def _pair(self, flat: Tensor, name: str) -> tuple[Tensor, Tensor]:
        start, (out, inputs) = self._starts[name], self.layout.by_name[name].shape
        left, right = flat[:, start : start + out + inputs].split((out, inputs), dim=1)
        return left, right

    def iterate(self, active_R: Tensor) -> None:
        """One power iteration with the weights as they are, in the trials that are active."""
        moves = active_R[:, None]
        for scaled in self._matrices:
            matrix = self.layout.view(self._weights.used, scaled.name)
            left, right = self._pair(self._vectors.used, scaled.name)
            new_left = _unit(_times(matrix, right))
            new_right = _unit(_times(matrix.mT, new_left))
            left.copy_(torch.where(moves, new_left, left))
            right.copy_(torch.where(moves, new_right, right))

    def stack(self, first: str, last: str | None, rows: slice) -> tuple[Tensor, Tensor]:
        """The vectors of the k matrices that the model reads as one, [r, k, out] and [r, k, in]."""
        names = list(self._starts)
        stacked = names[names.index(first) : names.index(last or first) + 1]
        pairs = [self._pair(self._vectors.used[rows], name) for name in stacked]
        left, right = (torch.stack(vectors, 1) for vectors in zip(*pairs, strict=True))
        return left, right


def _times(matrix_RxOxI: Tensor, vector_RxI: Tensor) -> Tensor:
    return product(matrix_RxOxI, vector_RxI[..., None])[..., 0]


def _unit(vector_RxD: Tensor) -> Tensor:
    return vector_RxD / sums.norm(vector_RxD)[:, None].clamp_min(SMALLEST_NORM)


@differentiable
def _undone(x: Tensor, leaf: Leaf, gamma: Leaf, *constants: Tensor) -> WithBackward[Tensor]:
    """Passes x through. On the way back the layer that read it has left the gradient of W_hat where that of W goes."""

    def backward(dx: Tensor, matrices: Tensor, factor: Tensor, sigma: Tensor, left: Tensor, right: Tensor) -> Tensor:
        gradient = leaf.gradient.view_as(matrices)
        along = sums.total((gradient * matrices).flatten(2)) / sigma
        gamma.gradient.copy_(along)
        gradient.sub_((along[..., None] * left)[..., None] * right[..., None, :])
        gradient.mul_((factor / sigma)[..., None, None])
        return dx

    return x.view_as(x), backward, constants


def reparametrised(
    x_RxNxI: Tensor, leaf: Leaf, gamma: Leaf, left_RxKxO: Tensor, right_RxKxI: Tensor
) -> tuple[Tensor, Leaf]:
    """x and the leaf of W_hat, for `harness.model.layers.linear`.

    Its backward pass then fills the gradients of both leaves.

    `leaf` holds k matrices [R, k x O, I], `gamma` a number for each [R, k].
    """
    matrices = leaf.weight.unflatten(1, left_RxKxO.shape[1:])
    images = torch.stack([_times(w, v) for w, v in zip(matrices.unbind(1), right_RxKxI.unbind(1), strict=True)], 1)
    sigma = sums.total(left_RxKxO * images)
    normed = (matrices * (gamma.weight / sigma)[..., None, None]).view_as(leaf.weight)
    x = _undone(x_RxNxI, leaf, gamma, matrices, gamma.weight, sigma, left_RxKxO, right_RxKxI)
    return x, Leaf(normed, leaf.gradient)
