"""Clipping by global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.clippers.base import Clipper
from harness.clipping import clip_by_global_norm
from harness.config import Trial


class GlobalNorm(Clipper):
    """`optim.clip`: gradients scaled to a global norm of at most that (Pascanu et al. 2013, arXiv 1211.5063)."""

    order = 90

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return trial.optim.clip is not None

    def bind(self, trials: Sequence[Trial]) -> None:
        limits = [float("inf") if trial.optim.clip is None else trial.optim.clip for trial in trials]
        self._limits = torch.tensor(limits, dtype=torch.float64)

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> None:
        # A gradient that is thrown away is not clipped: a NaN norm would reach what stands between the tensors.
        self._limits = self._limits.to(norm_R.device)
        clip_by_global_norm(gradients_RxP, torch.where(active_R, norm_R, 0.0), self._limits)
