"""An objective of one file: the end of each sequence is learned, and its beginning is only read, as a prompt is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import PER_TRIAL, Trial, number
from harness.model.gpt import GPT
from harness.objectives.loss import cross_entropy
from harness.objectives.next_token import NextToken


@dataclass(frozen=True)
class Options:
    """`completion.*`."""

    prompt: float = number(PER_TRIAL, 0.5, "share of each sequence that has no loss", low=0, below=1)


class Completion(NextToken):
    """Next-token prediction whose loss is the mean over the targets behind the prompt; validation is over all."""

    def bind(self, trials: Sequence[Trial], numbers: Sequence[int]) -> None:
        super().bind(trials, numbers)
        self._prompts = [trial.section("completion").prompt for trial in trials]

    def loss(self, model: GPT, batch_rxbxx: Tensor, weights_rxb: Tensor | None, rows: slice) -> Tensor:
        targets = batch_rxbxx[:, :, 1:]
        length = targets.shape[-1]
        behind = torch.zeros(targets.shape, dtype=self._dtype, device=targets.device)
        for row, prompt in enumerate(self._prompts[rows]):
            begin = int(prompt * length)
            behind[row, :, begin:] = length / (length - begin)
        weights = behind if weights_rxb is None else behind * weights_rxb[..., None]
        return cross_entropy(model(batch_rxbxx[:, :, :-1], rows), targets.flatten(1), None, weights.flatten(1))
