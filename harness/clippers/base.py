"""What every clipper of gradients shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Trial
from harness.parameters import Layout
from harness.state import State


class Clipper:
    """Base of the clippers: made for a pack in which some trial asks for it, and called at every step.

    `order` says which of several acts first. A clipper with a memory adds its arrays [R, ...] to the pack's `state`.
    """

    order: ClassVar[int] = 0

    def __init__(self, layout: Layout, state: State, rows: int, device: torch.device):
        self.layout = layout

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        """Whether the trial's configuration asks for it."""
        raise NotImplementedError

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        raise NotImplementedError

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> None:
        """Clip the gradients in place. `norm_R` is their global norm as they come, float64.

        A row that is not active is left as it is, and so is what the clipper remembers of it.
        """
        raise NotImplementedError
