"""Matrices of norm 1 along the width, after each step of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.hypersphere import on_sphere
from harness.model.parameters import Layout
from harness.model.state import Rows
from harness.optim.over_ranks import OverRanks


class UnitRows:
    """`model.hypersphere`, right after the optimizer's step: nGPT (arXiv 2410.01131), section 2.6, step 2.

    Moments stay as they are. The norms that telemetry shows are those of the optimizer's step, before this.
    """

    part = "model.hypersphere"

    def __init__(self, layout: Layout, weights: Rows):
        self._layout, self._weights = layout, weights

    def bind(self, trials: Sequence[Trial]) -> None:
        """There is nothing to know of the rows."""

    def act(self, stepping_R: Tensor, ranks: OverRanks) -> Tensor:
        """Normalise the weights of the trials that step; it says in which rows, [R]."""
        for view, values in on_sphere(self._layout, self._weights.used):
            view.copy_(torch.where(stepping_R[:, None, None], values, view))
        return stepping_R
