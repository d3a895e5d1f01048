"""How strongly a policy is held to its reference, and how strongly its entropy is asked for, over a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.state import State

SCHEDULES = ("constant", "rising", "falling", "adaptive")
WIDEST, GAIN = 0.2, 0.1  # of Ziegler et al. 2019: the largest error that counts, and K_beta
LARGEST = 1.0  # constant of an adaptive bonus on entropy: that of TRL 1.16


class PenaltyConstant:
    """beta of each row, [R]: constant, a line, or held where the KL is as wanted.

    `rising` goes from 0 at the first step to twice `policy.beta` at the last, and `falling` back, so that the mean over
    the run is `policy.beta` in all three. `adaptive` starts there, and after each rollout multiplies by 1 + 0.1 e,
    with e = KL / `policy.kl_target` - 1, between -0.2 and 0.2 (Ziegler et al. 2019, arXiv 1909.08593, section 2.2);
    KL is that of whole completions.
    """

    def __init__(self, trials: Sequence[Trial], dtype: torch.dtype, device: torch.device, state: State):
        factors = torch.ones(len(trials), dtype=torch.float64, device=device)
        self._factor = state.add("penalty_factor", factors)
        self._dtype = dtype

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        options, device = [trial.section("policy") for trial in trials], self._factor.used.device

        def column(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        self._beta = column([one.beta or 0.0 for one in options])
        self._target = column([one.kl_target for one in options])
        rises = {"rising": 1.0, "falling": -1.0}
        self._slope = column([rises.get(one.beta_schedule, 0.0) for one in options])
        self._last = column([max(1, trial.steps - 1) for trial in trials])
        is_adaptive = [one.beta_schedule == "adaptive" for one in options]
        self._is_adaptive = torch.tensor(is_adaptive, device=device)

    def at(self, step_R: Tensor) -> Tensor:
        """Of each row at its step, [R]."""
        place = 2 * step_R.double() / self._last - 1  # from -1 to 1
        return (self._beta * self._factor.used * (1 + self._slope * place)).to(self._dtype)

    def adapt(self, kl_R: Tensor, where_R: Tensor) -> None:
        """After a rollout of these rows, whose completions are so far from the reference, nat a completion, [R]."""
        error = (kl_R.double() / self._target - 1).clamp(-WIDEST, WIDEST)
        grown = self._factor.used * (1 + GAIN * error)
        is_changed = where_R & self._is_adaptive & error.isfinite()
        self._factor.used.copy_(torch.where(is_changed, grown, self._factor.used))


class EntropyConstant:
    """The constant of the bonus on entropy of each row, [R], where `policy.entropy_target` lets it adapt.

    Skywork-OR1 (He et al. 2025, arXiv 2505.22312) as TRL 1.16 has it: after each rollout the constant, which starts at
    `policy.entropy`, grows by `policy.entropy_step` if the entropy of a token is at most the target, and falls by as
    much if it is above, between 0 and 1. A rollout trains with the constant if the entropy of the rollout before was at
    most the target, and else without. With one step on a rollout that is TRL's rule, step by step.
    """

    def __init__(self, trials: Sequence[Trial], device: torch.device, state: State):
        starts = [trial.section("policy").entropy or 0.0 for trial in trials]
        first = torch.tensor([[start, torch.inf, 0.0] for start in starts], dtype=torch.float64, device=device)
        self._kept = state.add("entropy_constant", first)  # the constant, the last entropy, what is in force

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials."""
        options, device = [trial.section("policy") for trial in trials], self._kept.used.device
        numbers = [[one.entropy_target, one.entropy_step] for one in options]
        self._target, self._step = torch.tensor(numbers, dtype=torch.float64, device=device).unbind(1)

    @property
    def now(self) -> Tensor:
        """What is in force, [R], float64."""
        return self._kept.used[:, 2]

    def adapt(self, entropy_R: Tensor, where_R: Tensor) -> None:
        """After a rollout of these rows, whose tokens have this entropy, nat, [R]."""
        constant, last = self._kept.used[:, 0], self._kept.used[:, 1]
        in_force = torch.where(last <= self._target, constant, 0.0)
        moved = torch.where(entropy_R <= self._target, constant + self._step, constant - self._step)
        new = torch.stack((moved.clamp(0.0, LARGEST), entropy_R, in_force), 1)
        self._kept.used.copy_(torch.where(where_R[:, None], new, self._kept.used))
