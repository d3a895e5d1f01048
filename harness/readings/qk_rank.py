"""In how many directions a step changes the attention logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from harness.config import Trial
from harness.model import sums
from harness.model.branches import branches_of
from harness.model.layers import for_each_trial
from harness.model.outline import model_tensors
from harness.model.products import product
from harness.optim.optimizers.base import Optimizer
from harness.readings.base import ReadingSignal, StepReading, each_log

SMALLEST = 1e-300  # share: its logarithm counts for nothing


class QkRank(StepReading):
    """exp(-sum p log p), p = s^2 / sum s^2, of the singular values s of dWq Wk^T + Wq dWk^T (arXiv 2606.28116).

    Of each head, with dW the change of the step, and the mean over heads; NaN where nothing changed. The change is
    [dWq Wq] [Wk dWk]^T, of which a head has 2 x head_dim columns, so s^2 are the eigenvalues of a product of two Gram
    matrices of that size, in float64.
    """

    cadence = 0
    compares = True
    waits = True  # for whether eigenvalues were found
    help = "effective rank of the change of query-key products"
    signals = {
        "qk_rank": ReadingSignal(("layer",), "1", "effective rank of the change of query-key products, mean over heads")
    }

    @classmethod
    def missing(cls, trial: Trial) -> str:
        names = {tensor.name for tensor in model_tensors(trial.model, 1, branches_of(trial))}
        needed = [f"blocks.{layer}.attention.query" for layer in range(trial.model.depth)]
        return "" if names.issuperset(needed) else "this model has no queries and keys"

    def read(self, before_RxP: Tensor | None, optimizer: Optimizer) -> Mapping[str, Tensor]:
        assert before_RxP is not None
        layers = [self._of_layer(layer, before_RxP, optimizer.weights) for layer in range(self.depth)]
        return {"qk_rank": torch.stack(layers, 1)}

    def _of_layer(self, layer: int, before_RxP: Tensor, after_RxP: Tensor) -> Tensor:
        layout, head_dim = self.known.layout, self.known.trial.model.head_dim
        sides = []
        for name in ("query", "key"):
            was, now = (
                layout.view(flat, f"blocks.{layer}.attention.{name}").double() for flat in (before_RxP, after_RxP)
            )
            both = ((now - was), was) if name == "query" else (was, (now - was))
            by_head = [x.unflatten(1, (-1, head_dim)) for x in both]  # [R, H, head_dim, D]
            side = torch.cat(by_head, 2)
            sides.append(product(side, side.mT.contiguous()))  # [R, H, 2 head_dim, 2 head_dim]
        return _effective_rank(*sides)


def _effective_rank(left: Tensor, right: Tensor) -> Tensor:
    """Of A B^T, the mean over heads, [R], from A^T A and B^T B, [R, H, n, n]."""
    sizes = [sums.total(gram.diagonal(dim1=-2, dim2=-1).contiguous())[..., None, None] for gram in (left, right)]
    is_sound = torch.stack([(size > 0) & (size < torch.inf) for size in sizes]).all(0)
    left, right = (torch.where(is_sound, gram / size, 0.0) for gram, size in zip((left, right), sizes, strict=True))
    values, vectors = torch.linalg.eigh(left)
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]  # A^T A = root root^T
    inner = product(root.mT.contiguous(), product(right, root))
    squares = torch.linalg.eigvalsh((inner + inner.mT) / 2).clamp(min=0)
    shares = squares / sums.total(squares)[..., None]
    surprise = each_log(shares.clamp(min=SMALLEST).contiguous())
    entropy = sums.total(shares * surprise).neg()
    rank = sums.mean(for_each_trial(torch.exp, entropy))
    return torch.where(is_sound[..., 0, 0].all(-1), rank, torch.nan)
