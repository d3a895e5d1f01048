"""AdEMAMix: Adam's step with a second, slow momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import PER_TRIAL, Trial, number
from harness.config.limits import MOST_STEPS
from harness.optim.optimizers.adamw import Adam
from harness.optim.optimizers.base import Numbers, Piece, each, options


@dataclass(frozen=True)
class Options:
    """`ademamix.*`, with the defaults of pytorch-optimizer."""

    alpha: float = number(PER_TRIAL, 5.0, "how much the slow momentum counts beside the other one", low=0)
    beta3: float = number(PER_TRIAL, 0.9999, "decay of the slow momentum", above=0, below=1)
    warmup: int | None = number(
        PER_TRIAL, None, "steps over which alpha and beta3 rise; null: the whole run", low=1, high=MOST_STEPS
    )


def _warmup(trial: Trial) -> float:
    warmup: int | None = trial.section("ademamix").warmup
    return trial.steps if warmup is None else warmup


class AdEMAMix(Adam):
    """Pagliardini et al. 2024 (arXiv 2409.03137), algorithm 1: the corrected first moment, plus alpha times a slow one.

    The slow one is not corrected. alpha rises in a line from 0, and the slow decay from beta1 so that its half-life
    does (their appendix A.1); the paper takes the whole run for both. An infinite gradient leaves no finite weights.
    """

    slots = ("moment_1", "moment_2", "slow_moment")
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {
        **Adam.hyperparameters,
        **options("ademamix", "alpha", "beta3"),
        "warmup": _warmup,
    }

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        yield from super().idle(trial)
        if trial.section("ademamix").alpha == 0:
            yield "ademamix.alpha", "ademamix.alpha=0: the slow momentum does not count; it takes ademamix.alpha > 0"

    def numbers(self, h: Numbers) -> Numbers:
        share = (h["count"] / h["warmup"]).clamp(max=1.0)
        log3 = each(torch.log, h["beta3"])
        beta = each(torch.exp, log3 / ((1 - share) * (log3 / each(torch.log, h["beta1"])) + share))
        beta = torch.minimum(beta, h["beta3"])
        return {**super().numbers(h), "alpha_now": share * h["alpha"], "slow": beta, "slow_rest": 1 - beta}

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        first, root = self.moments(piece, h, piece.gradients)
        slow = piece.slots["slow_moment"].mul_(h["slow"]).add_(piece.gradients * h["slow_rest"])
        root.add_(h["eps"] * piece.segment.epsilon)
        return (first * h["scale1"]).add_(slow * h["alpha_now"]).div_(root)
