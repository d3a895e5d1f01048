"""What every clipper of gradients shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.parameters import Layout
from harness.model.state import State


class Clipper:
    """Base of the clippers: made for a pack in which some trial asks for it, and called at every step.

    A clipper with a memory adds its arrays [R, ...] to the pack's `state`, and then forks, snapshots and masked trials
    see it. What it remembers is to stay finite, whatever the gradients are.
    """

    part: ClassVar[str] = ""  # the key that switches it on, under which its steps are counted; "": they are not
    order: ClassVar[int] = 0  # which of several acts first
    of_ranks: ClassVar[bool] = False  # whether it clips the gradient of each rank, before the mean over ranks
    needs_norm: ClassVar[bool] = True  # whether it looks at the global norm; if another acted before, that is a pass
    repairs_infinity: ClassVar[bool] = False  # whether infinite elements are finite afterwards; NaN freezes a trial

    def __init__(self, layout: Layout, state: State, rows: int, device: torch.device):
        self.layout, self.device = layout, device

    @classmethod
    def limit_of(cls, trial: Trial) -> float | None:
        """The value of `part` in the trial's configuration."""
        section, _, name = cls.part.partition(".")
        strength: float | None = getattr(trial.section(section), name)
        return strength

    @classmethod
    def is_on(cls, trial: Trial) -> bool:
        """Whether the trial's configuration asks for it: the value of `part` is not null."""
        return cls.limit_of(trial) is not None

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        """(key, why) of what cannot act in a trial that asks for it."""
        yield from ()

    def bind(self, trials: Sequence[Trial]) -> None:
        """Work on the rows in use from now on, which are these trials; `limit` is the value of `part` in each, [R]."""
        self.limit = self.column(trials, self.limit_of)

    def clip(self, gradients_RxP: Tensor, norm_R: Tensor, active_R: Tensor) -> Tensor:
        """Clip the gradients in place, and say in which rows it changed any, [R]. `norm_R` is their norm, float64.

        A row that is not active is left as it is, and so is what the clipper remembers of it. The columns between
        tensors are zero and have to stay so.
        """
        raise NotImplementedError

    def column(self, trials: Sequence[Trial], read: Callable[[Trial], float | None]) -> Tensor:
        """One number a trial, [R], float64; infinity where there is none."""
        values = [read(trial) for trial in trials]
        exact = [float("inf") if value is None else value for value in values]
        return torch.tensor(exact, dtype=torch.float64, device=self.device)


def first_to_repair(trial: Trial, clippers: Iterable[Clipper]) -> str | None:
    """Who can make a finite step of an infinite gradient: what acts on it first decides, because 0 * inf is NaN.

    `clippers` are in the order in which they act. With dynamic loss scaling it costs the step before anything acts on
    it, as in torch.amp.GradScaler.
    """
    if trial.train.loss_scaling == "dynamic":
        return None
    acting = [clipper.repairs_infinity for clipper in clippers if clipper.is_on(trial)]
    return ("clipper" if acting[0] else None) if acting else "optimizer"
