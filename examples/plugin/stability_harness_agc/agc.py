"""Adaptive gradient clipping: a gradient is held to a multiple of the norm of the weights that it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import SWITCHED, Trial, number
from harness.model.parameters import Layout
from harness.model.state import State
from harness.optim.clippers import Clipper
from harness.optim.clipping import clipping_factor, scale_tensors, tensor_norms

LEAST_NORM = 1e-3  # of the weights, so that a tensor that starts at zero can learn


@dataclass(frozen=True)
class Options:
    """`agc.*`."""

    ratio: float | None = number(
        SWITCHED, None, "largest norm of a tensor's gradient, over the norm of its weights; null: any", above=0
    )


class AGC(Clipper):
    """Brock et al. 2021 (arXiv 2102.06171), section 4, tensor by tensor, where the paper takes each unit by itself."""

    part = "agc.ratio"  # under this key the results count at how many steps it acted
    order = 25  # after optim.clip_tensor, before those that remember norms
    needs_norm = False

    def __init__(self, layout: Layout, state: State, rows: int, device: torch.device):
        super().__init__(layout, state, rows, device)
        self._state = state

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        return trial.section("agc").ratio is not None

    def bind(self, trials: Sequence[Trial]) -> None:
        self._ratio = self.column(trials, lambda trial: trial.section("agc").ratio)[:, None]

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        weights = tensor_norms(dict(self._state)["weights"], self.layout).clamp_(min=LEAST_NORM)
        factors = clipping_factor(tensor_norms(gradients_RxP, self.layout), self._ratio * weights)
        scale_tensors(gradients_RxP, torch.where(active_R[:, None], factors, 1.0), self.layout)
        return active_R & (factors != 1).any(1)
