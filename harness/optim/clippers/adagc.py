"""AdaGC: clipping of each tensor's gradient by the norms that it had before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import PER_TRIAL, SWITCHED, Trial, number, steps_of
from harness.model.parameters import Layout
from harness.model.state import State
from harness.optim.clippers.base import Clipper
from harness.optim.clipping import clipping_factor, scale_tensors, tensor_norms


@dataclass(frozen=True)
class Options:
    """`adagc.*`, with the defaults of the authors' code, but for the warm-up, which there is of 100 steps."""

    threshold: float | None = number(
        SWITCHED, None, "largest norm of a tensor's gradient, over the moving average of its norms; null: any", above=0
    )
    beta: float = number(PER_TRIAL, 0.99, "decay of the moving average of each tensor's clipped norm", low=0, below=1)
    warmup: int | None = number(
        PER_TRIAL,
        None,
        "first steps, in which gradients are clipped by global norm; null: as warmup_share says (the authors: 100)",
        low=0,
    )
    warmup_share: float = number(
        PER_TRIAL, 0.05, "share of train.steps that the warm-up takes, where warmup is null", low=0, high=1
    )
    warmup_clip: float = number(PER_TRIAL, 1.0, "largest global gradient norm in the warm-up", above=0)


class AdaGC(Clipper):
    """Wang et al. 2025 (arXiv 2502.11034), as in the authors' code (github.com/lishuai-97/AdaGC, mode AdaGC).

    In the warm-up the gradients are clipped by their global norm, and each tensor remembers the smallest norm that it
    had afterwards. Then each is clipped to `threshold` times what it remembers, which becomes a moving average of its
    clipped norm. The code has threshold 1.04 and beta 0.99; pytorch-optimizer's AdaGC 1.05 and 0.98.

    A warm-up norm of zero is not remembered, unlike in the code: the first gradients of most tensors are zero where
    the head or the residual matrices start at zero, and a memory of zero would let nothing through ever after. Nor are
    steps whose global norm is not finite; the factor of a tensor with an infinite element is 0, which leaves NaN.
    """

    part = "adagc.threshold"
    order = 30

    def __init__(self, layout: Layout, state: State, rows: int, device: torch.device):
        super().__init__(layout, state, rows, device)
        nothing = torch.full((rows, len(layout.tensors)), float("inf"), dtype=torch.float64, device=device)
        self._average = state.add("adagc_average", nothing)  # infinite: nothing is remembered yet
        self._count = state.add("adagc_count", torch.zeros(rows, dtype=torch.float64, device=device))

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        if (warmup := warmup_steps(trial)) >= trial.steps:
            why = f"gradients are clipped by global norm alone in {trial.steps} steps, which are all warm-up"
            yield cls.part, f"adagc.warmup={warmup}: {why}"

    def bind(self, trials: Sequence[Trial]) -> None:
        super().bind(trials)
        self._beta = self.column(trials, lambda trial: trial.section("adagc").beta)[:, None]
        self._warmup = self.column(trials, warmup_steps)
        self._warmup_clip = self.column(trials, lambda trial: trial.section("adagc").warmup_clip)

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        average, norms = self._average.used, tensor_norms(gradients_RxP, self.layout)
        is_warming = (self._count.used < self._warmup)[:, None]
        limits, together = self.limit[:, None] * average, clipping_factor(norm_R, self._warmup_clip)[:, None]
        separate = torch.where(norms > limits, clipping_factor(norms, limits), 1.0)
        factors = torch.where(is_warming, torch.where(together < 1, together, 1.0), separate)
        scale_tensors(gradients_RxP, torch.where(active_R[:, None], factors, 1.0), self.layout)

        seen = torch.where(is_warming, norms * together, torch.minimum(norms, limits))
        least = torch.where(seen > 0, torch.minimum(seen, average), average)
        moving = self._beta * average + (1 - self._beta) * seen
        new = torch.where(is_warming | torch.isinf(average), least, moving)
        remembers = active_R & torch.isfinite(norm_R)
        average.copy_(torch.where(remembers[:, None], new, average))
        self._count.used.add_(remembers)
        return active_R & ((separate != 1) & ~is_warming).any(1)


def warmup_steps(trial: Trial) -> int:
    """How many steps the warm-up takes."""
    options = trial.section("adagc")
    return steps_of(options.warmup, options.warmup_share, trial.train.steps)
