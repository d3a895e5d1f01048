"""ZClip: clipping of gradient norms that are spikes by the standards of the norms before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import PER_TRIAL, SWITCHED, Trial, choice, number
from harness.model.parameters import Layout
from harness.model.state import State
from harness.optim.clippers.base import Clipper
from harness.optim.clipping import EPSILON, clipping_factor, scale_trials

CAPS = ("reciprocal", "mean", "threshold")


@dataclass(frozen=True)
class Options:
    """`zclip.*`, with the defaults of the authors' code."""

    threshold: float | None = number(
        SWITCHED,
        None,
        "standard deviations over their mean beyond which a gradient norm is clipped; null: none",
        above=0,
    )
    alpha: float = number(PER_TRIAL, 0.97, "decay of the mean and the variance of gradient norms", low=0, below=1)
    warmup: int = number(PER_TRIAL, 25, "steps whose norms give the first mean and variance, unclipped", low=1)
    cap: str = choice(
        PER_TRIAL,
        "reciprocal",
        "norm of a spike of z after clipping; reciprocal: mean + threshold^2 / z deviations; threshold: mean + "
        "threshold deviations; mean: the mean",
        *CAPS,
    )


class ZClip(Clipper):
    """Kumar et al. 2025 (arXiv 2504.02507), as in the authors' code (github.com/bluorion-com/ZClip).

    A norm g is a spike if z = (g - mean) / (deviation + 1e-6) exceeds the threshold. Mean and variance move on with
    the norm as it is clipped to, not as it came. The code also clips every gradient to a norm of 1, spike or not,
    unless told otherwise (`max_grad_norm`): that is `optim.clip=1`, which acts after this and is not remembered here
    (nor there), so `mitigation=zclip+clip_1` is the code with its defaults.

    An infinite norm is clipped by 0, which leaves NaN. A norm that is not finite is never remembered, unlike in the
    code, where it would stay in the mean for good.
    """

    part = "zclip.threshold"
    order = 40

    def __init__(self, layout: Layout, state: State, rows: int, device: torch.device):
        super().__init__(layout, state, rows, device)
        names = ("zclip_count", "zclip_mean", "zclip_variance")
        self._memory = [state.add(name, torch.zeros(rows, dtype=torch.float64, device=device)) for name in names]

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        warmup = trial.section("zclip").warmup
        if warmup >= trial.steps:
            yield cls.part, f"zclip.warmup={warmup}: nothing is clipped in {trial.steps} steps, which are all warm-up"

    def bind(self, trials: Sequence[Trial]) -> None:
        super().bind(trials)
        self._alpha = self.column(trials, lambda trial: trial.section("zclip").alpha)
        self._warmup = self.column(trials, lambda trial: trial.section("zclip").warmup)
        caps = [trial.section("zclip").cap for trial in trials]
        self._is_cap = {name: torch.tensor([cap == name for cap in caps], device=self.device) for name in CAPS}

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        count, mean, variance = (rows.used for rows in self._memory)
        is_warming, deviation = count < self._warmup, variance.sqrt()
        z = (norm_R - mean) / (deviation + EPSILON)
        is_spike = ~is_warming & (z > self.limit)
        above = self.limit * deviation
        above = torch.where(self._is_cap["reciprocal"], above / (z / self.limit), above)
        limit = mean + torch.where(self._is_cap["mean"], 0.0, above)
        factor = torch.where(active_R & is_spike, clipping_factor(norm_R, limit), 1.0)
        scale_trials(gradients_RxP, factor, self.layout)

        seen, remembers = torch.where(is_spike, limit, norm_R), active_R & torch.isfinite(norm_R)
        n, rest = count + 1, 1 - self._alpha
        # While warming up these are Welford's mean and variance of all norms so far.
        new_mean = torch.where(is_warming, mean + (seen - mean) / n, self._alpha * mean + rest * seen)
        plain = variance + ((seen - mean) * (seen - new_mean) - variance) / n
        moving = self._alpha * variance + rest * (seen - new_mean).square()
        new = (n, new_mean, torch.where(is_warming, plain, moving))
        for rows, values in zip(self._memory, new, strict=True):
            rows.used.copy_(torch.where(remembers, values, rows.used))
        return factor != 1
