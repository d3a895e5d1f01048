"""Loss scaling, per trial: what half precision would lose of small gradients is lifted into its range.

The arithmetic of torch.amp.GradScaler (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The loss is multiplied
by the scale before the backward pass, and gradients by its reciprocal after the mean over ranks. A dynamic scale is
halved when a gradient is not finite, which costs the trial that step, and doubled after so many clean steps in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from harness.config import LARGEST_SCALE, SMALLEST_SCALE, Trial
from harness.model.state import State

BACKOFF, GROWTH = 0.5, 2.0


def refused(trial: Trial) -> Iterator[str]:
    """A dynamic scale that is given up at once."""
    train = trial.train
    if train.loss_scaling == "dynamic" and train.loss_scale < SMALLEST_SCALE:
        why = f"below {SMALLEST_SCALE}, where train.loss_scaling=dynamic gives up"
        yield f"train.loss_scale={train.loss_scale}: {why}; allowed: {SMALLEST_SCALE} to {LARGEST_SCALE}"
    if train.loss_scale_per != "batch":
        given = f"train.loss_scale_per={train.loss_scale_per}"
        if train.loss_scaling == "none":
            yield f"{given}: there is no scale; allowed: batch, or another train.loss_scaling"
        elif train.parts == 1:
            yield f"{given}: the batch has one part; allowed: batch, or more train.ranks or train.micro_batches"


class LossScale:
    """Each row's scale, [R], and its clean steps since the scale changed last, [R]; `bind` says which trials they are.

    A trial without loss scaling has a scale of 1, by which multiplying changes no bit. All stays on the device.
    """

    def __init__(self, trials: Sequence[Trial], dtype: torch.dtype, device: torch.device, state: State):
        scales = [1.0 if t.train.loss_scaling == "none" else t.train.loss_scale for t in trials]
        self._scale = state.add("loss_scale", torch.tensor(scales, dtype=dtype, device=device))
        self._is_per_part = trials[0].train.loss_scale_per == "micro_batch"
        clean = torch.zeros(len(trials), dtype=torch.int64, device=device)
        self._clean = state.add("steps_without_overflow", clean)

    @property
    def scale(self) -> Tensor:
        return self._scale.used

    @property
    def clean(self) -> Tensor:
        return self._clean.used

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        self._kinds = [trial.train.loss_scaling for trial in trials]
        self.is_on, self.is_dynamic = any(kind != "none" for kind in self._kinds), "dynamic" in self._kinds
        self.dynamic = torch.tensor([kind == "dynamic" for kind in self._kinds], device=self.scale.device)
        self._growth = torch.tensor([trial.train.loss_scale_growth for trial in trials], device=self.scale.device)

    def shown(self, row: int) -> Mapping[str, Tensor]:
        """The scale of one trial, for the site of that name; nothing where the trial has none."""
        return {} if self._kinds[row] == "none" else {"loss_scale": self.scale[row]}

    def unscale(self, gradients_RxP: Tensor) -> None:
        """Divide the gradients of a whole batch by each trial's scale, in place; what is not finite stays so."""
        if self.is_on and not self._is_per_part:
            self._divide(gradients_RxP)

    def unscale_part(self, gradients_RxP: Tensor) -> None:
        """The same for those of a micro-batch, before they are added, where that is asked for."""
        if self.is_on and self._is_per_part:
            self._divide(gradients_RxP)

    def of_part(self, scale_R: Tensor) -> Tensor:
        """What the gradients of a rank are multiplied by, [R], where that is the scale."""
        return torch.ones_like(scale_R) if self._is_per_part else scale_R

    def _divide(self, gradients_RxP: Tensor) -> None:
        gradients_RxP.mul_(self.scale.double().reciprocal().to(gradients_RxP.dtype)[:, None])

    def adapt(self, finite: Tensor, active: Tensor) -> Tensor:
        """Halve or double the dynamic scales, from whether each trial's gradients are `finite`, [R].

        Only `active` trials change. Returns the trials that can go on, [R]: their gradients are finite, or their scale
        is dynamic and, halved, neither below `SMALLEST_SCALE` nor itself not finite.
        """
        if not self.is_dynamic:
            return finite
        changing = self.dynamic & active
        clean = self.clean + 1
        full, doubled = clean >= self._growth, self.scale * GROWTH
        grown = torch.where(full & torch.isfinite(doubled), doubled, self.scale)
        scale = torch.where(finite, grown, self.scale * BACKOFF)
        self.clean.copy_(torch.where(changing, torch.where(finite & ~full, clean, 0), self.clean))
        self.scale.copy_(torch.where(changing, scale, self.scale))
        usable = torch.isfinite(scale) & (scale.abs() >= SMALLEST_SCALE)
        return finite | (self.dynamic & usable)
