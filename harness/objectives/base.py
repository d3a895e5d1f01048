"""What every objective shares: all that the pack and the loop know of what a model is trained for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from harness.config import Trial
from harness.model.gpt import GPT
from harness.model.state import Rows, State
from harness.policy.rows import PassingRows, SiteStrikes

if TYPE_CHECKING:  # runs of one's own have no corpus, and load nothing of it
    from harness.data.corpus import Corpus

Steps = int | Sequence[int]  # the step at which all rows stand, or that of each


class Objective:
    """Made for the trials of a pack; `bind` says which of them are the rows now.

    A batch is a tensor [R, B, ...] with an entry for each sequence, so that ranks and micro-batches can take their
    parts of it. What the data loader hands out to a row at a step is a function of its trial and that step: nothing is
    drawn. What trains may be sampled from the model (`is_sampled`), and is then state of the row.
    """

    dropped: Tensor  # [R]: sequences of the last batch that were dropped
    trains: Tensor  # [R]: which rows have any left
    acted: Mapping[str, Tensor] = {}  # [R] by part of the recipe: where it changed what trains
    may_replay: ClassVar[bool] = False  # whether `loss` and `window_losses` do the same each time, on the device alone
    is_sampled: ClassVar[bool] = False  # whether what trains comes from the model, so that no trial alone tells of it
    reported: ClassVar[tuple[str, str]] = ("nat/token", "training loss")  # unit ("1": none) and name of the loss
    judged_by: ClassVar[Sequence[str]] = ()  # signals of readings, one number a step, by which it judges runs
    taps: ClassVar[Sequence[str]] = ()  # what it shows of its passes, beside the model's own taps

    def __init__(self, trials: Sequence[Trial], corpus: Corpus, dtype: torch.dtype, device: torch.device): ...

    def bind(self, trials: Sequence[Trial], numbers: Sequence[int]) -> None:
        """Work on these rows from now on: their trials, and their numbers in the pack as planned."""
        raise NotImplementedError

    def join(self, here: Sequence[Trial], model: GPT, weights: Rows, state: State) -> None:
        """Take part in the state of a pack, whose rows are these trials as it is made; `weights` are the first ones."""

    def batch(self, steps: Steps) -> Tensor:
        """What the data loader hands out, [R, B, ...]. Never waits for the device."""
        raise NotImplementedError

    def what_trains(
        self, batch_RxBxx: Tensor, steps: Steps, size: int, active_R: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A batch of the loader as it trains, at the sizes of step `size`, and the weight of each sequence, [R, b].

        None: all count alike.
        """
        raise NotImplementedError

    def roll_out(self, batch_RxBxx: Tensor, rows: PassingRows, strike: SiteStrikes) -> Tensor:
        """What trains of a batch that is there, [R, b, ...], now that weights are as they are read in this step.

        Without a look at the device.
        """
        return batch_RxBxx

    def rolled_out(self, batch_RxBxx: Tensor) -> Tensor:
        """What `roll_out` has given in the step at hand, once more."""
        return batch_RxBxx

    def loss(self, model: GPT, batch_rxbxx: Tensor, weights_rxb: Tensor | None, rows: slice) -> Tensor:
        """Mean loss of these rows, [r]; its backward pass fills the model's gradients."""
        raise NotImplementedError

    def forward(self, model: GPT, batch_rxbxx: Tensor, rows: slice) -> None:
        """One forward pass, of which nobody wants the loss."""
        self.loss(model, batch_rxbxx, None, rows)

    def held_out(self, tokens: int) -> Tensor:
        """Where windows of the held-out data start that have at least so many targets: int64 [S, k], S segments."""
        raise NotImplementedError

    def window_losses(self, model: GPT, starts_N: Tensor, rows: slice) -> Tensor:
        """Loss of each of these windows under each of these rows, [r, N], float64."""
        raise NotImplementedError

    @property
    def records(self) -> Sequence[Sequence[dict[str, Any]]]:
        """What was dropped of each planned trial's batches so far, each with its `step`; here the host waits."""
        return ()

    def restore(self, records: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Go back to these records of each planned trial."""

    def forget(self, number: int, step: int) -> None:
        """A planned trial goes back to this step: what was recorded since is none of its history."""

    def reset_reference(self, row: int) -> None:
        """The weights of a row, as they are now, become the reference of its policy."""
        raise NotImplementedError

    def judge_with(
        self, read: Mapping[str, np.ndarray], loss: np.ndarray, nonfinite_step: int | None, is_untrained: bool = True
    ) -> str:
        """The same, with the signals of `judged_by` that were read, [steps] each."""
        return self.judge(loss, nonfinite_step, is_untrained)

    def judge(self, loss: np.ndarray, nonfinite_step: int | None, is_untrained: bool = True) -> str:
        """How a run ended: from its training loss, [steps], and the step at which it stopped being finite, if any.

        Not `is_untrained`: it began from the weights of another run (`model.start`).
        """
        raise NotImplementedError
