"""Next-token prediction: windows of a text, and the cross-entropy of each token after those before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.config import Trial
from harness.data import curriculum
from harness.data.batches import Batches
from harness.data.corpus import Corpus
from harness.data.screening import Screening
from harness.model.gpt import GPT
from harness.objectives.base import Objective, Steps
from harness.objectives.loss import cross_entropy
from harness.objectives.outcome import judge


class NextToken(Objective):
    """Batches of token ids [R, B, T + 1], screened and cut to their sizes; nat/token, with z-loss in the gradient."""

    may_replay = True

    def __init__(self, trials: Sequence[Trial], corpus: Corpus, dtype: torch.dtype, device: torch.device):
        first, seeds = trials[0], [trial.seeds["data"] for trial in trials]
        self.batches = Batches(corpus, seeds, first.train.batch, first.model.context, device)
        self.screening, self.curriculum = Screening(trials, corpus, device), first.curriculum
        self._dtype, self._device = dtype, device

    def bind(self, trials: Sequence[Trial], numbers: Sequence[int]) -> None:
        self.batches.select(numbers)
        self.screening.bind(trials, numbers)
        z_loss = torch.tensor([trial.train.z_loss for trial in trials], dtype=self._dtype, device=self._device)
        self._z_loss = z_loss if any(trial.train.z_loss for trial in trials) else None

    def batch(self, steps: Steps) -> Tensor:
        return self.batches(steps)

    def what_trains(
        self, batch_RxBxx: Tensor, steps: Steps, size: int, active_R: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        batch = curriculum.loaded(self.curriculum, batch_RxBxx, size)
        batch, weights = self.screening(batch, steps, active_R)
        self.dropped, self.trains = self.screening.dropped, self.screening.trains
        self.acted = {f"screen.{name}": dropped for name, dropped in self.screening.beyond.items()}
        if weights is not None:
            weights = curriculum.share_out(self.curriculum, weights.to(self._dtype), size)
        return curriculum.cut(self.curriculum, batch, size), weights

    @property
    def records(self) -> Sequence[Sequence[dict[str, Any]]]:
        self.screening.collect()
        return self.screening.records

    def restore(self, records: Sequence[Sequence[dict[str, Any]]]) -> None:
        self.screening.restore(records)

    def forget(self, number: int, step: int) -> None:
        self.screening.forget(number, step)

    def loss(self, model: GPT, batch_rxbxx: Tensor, weights_rxb: Tensor | None, rows: slice) -> Tensor:
        logits, targets = model(batch_rxbxx[:, :, :-1], rows), batch_rxbxx[:, :, 1:]
        weights = None if weights_rxb is None else weights_rxb[:, :, None].expand_as(targets).flatten(1)
        z_loss = None if self._z_loss is None else self._z_loss[rows]
        return cross_entropy(logits, targets.flatten(1), z_loss, weights)

    def forward(self, model: GPT, batch_rxbxx: Tensor, rows: slice) -> None:
        model.stream(batch_rxbxx[:, :, :-1], rows)

    def held_out(self, tokens: int) -> Tensor:
        return self.batches.held_out(tokens)

    def window_losses(self, model: GPT, starts_N: Tensor, rows: slice) -> Tensor:
        windows = self.batches.validation(starts_N)
        inputs, targets = (x.expand(rows.stop - rows.start, -1, -1) for x in (windows[:, :-1], windows[:, 1:]))
        logits = model(inputs, rows).unflatten(1, inputs.shape[1:]).flatten(0, 1)
        losses: Tensor = cross_entropy(logits, targets.flatten(0, 1)).double().unflatten(0, inputs.shape[:2])
        return losses

    def judge(self, loss: np.ndarray, nonfinite_step: int | None, is_untrained: bool = True) -> str:
        return judge(loss, nonfinite_step, is_untrained)
