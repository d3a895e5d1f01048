"""Muon: the momentum of each matrix inside the blocks, with all its singular values next to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from harness.config import PER_TRIAL, Trial, number
from harness.model.products import product
from harness.model.tensors import Kind
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, norm, options

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the polynomial whose slope at zero is largest
ITERATIONS = 5
LEAST = 1e-7  # that a norm is divided by
RMS = 0.2  # of an update, about that of Adam's


@dataclass(frozen=True)
class Options:
    """`muon.*`."""

    momentum: float = number(PER_TRIAL, 0.95, "of matrices inside the blocks, Nesterov's", low=0, below=1)


def _wider(trial: Trial) -> float:
    """sqrt(m), by which the rate of a hidden matrix may fall less than muP's 1 / m, as its update has full rank."""
    model = trial.model
    return 1.0 if model.parametrization == "standard" else (model.width / model.base_width) ** 0.5


class Muon(Adam):
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon), with the size of updates of Liu et al. 2025.

    A matrix inside a block moves by 0.2 sqrt(max(out, in)) O, with O from five Newton-Schulz iterations on its
    momentum, so that rates and weight decay are AdamW's (arXiv 2502.16982, equation 4). Embeddings, head and vectors
    take AdamW's step, with `optim.beta1` and `beta2`; the others' second moment stays zero. Products are in the format
    of the weights; the authors' are bf16. An update whose singular values are all 1 changes what comes out by its
    largest one, so under muP its rate falls as 1 / sqrt(m), not as 1 / m (tests/harness/test_coordinate_check.py). A
    router's, whose outputs do not grow in number, is not multiplied.
    """

    per_tensor = True
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {
        **Adam.hyperparameters,
        **options("muon", "momentum"),
        "wider": _wider,
    }

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        if not piece.is_hidden:
            return super().update(piece, h)
        momentum = piece.slots["moment_1"].mul_(h["momentum"]).add_(piece.gradients)
        ahead = (momentum * h["momentum"]).add_(piece.gradients).unflatten(1, piece.shape)
        update = orthogonalised(ahead).flatten(1).mul_(RMS * max(piece.shape) ** 0.5)
        return update if piece.kind == Kind.ROUTER else update.mul_(h["wider"])


def orthogonalised(x_rxmxn: Tensor) -> Tensor:
    """Each matrix with singular values between about 0.7 and 1.2, by Newton-Schulz iterations; of zero it is zero."""
    a, b, c = COEFFICIENTS
    x = x_rxmxn.mT.contiguous() if x_rxmxn.shape[1] > x_rxmxn.shape[2] else x_rxmxn
    x = x / norm(x.flatten(1)).to(x.dtype).clamp(min=LEAST)[..., None]
    for _ in range(ITERATIONS):
        gram = product(x, x.mT)
        x = product((gram * b).add_(product(gram, gram), alpha=c), x).add_(x, alpha=a)
    return x.mT if x_rxmxn.shape[1] > x_rxmxn.shape[2] else x
