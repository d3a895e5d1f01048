"""Batch screening: sequences whose tokens are not those of the corpus are dropped before they train.

PaLM skips the batches around a loss spike, though they are not bad as such (Chowdhery et al. 2022, arXiv 2204.02311,
section 5.1); without text that repeats itself OLMo 2 saw fewer spikes (Walsh et al. 2025, arXiv 2501.00656, which masks
repeated n-grams). A sequence is scored as the data loader hands it out, T + 1 tokens long, so that a threshold means
the same while sequences grow:

- rarity: mean of -log p(token), with p the share of the token among the training tokens, one added to each count, so
  that a token that never occurs has a finite one (Laplace);
- repetition: share of its T token pairs that are there earlier in the sequence already;
- entropy: that of its tokens' histogram, at most log(T + 1).

Scores follow from a sequence alone: nothing is remembered from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import Trial
from harness.config.limits import KEPT_EVENTS
from harness.model import sums

if TYPE_CHECKING:  # runs of one's own have no corpus, and load nothing of it
    from harness.data.corpus import Corpus


def ordered(values: Tensor) -> Tensor:
    """Rising along the last axis. On a CPU by numpy, which takes a third of torch's time for short rows."""
    return torch.from_numpy(np.sort(values.numpy(), -1)) if on_cpu(values) else values.sort(-1).values


class Scores:
    """The three scores of sequences of tokens [..., T+1], float64 [...], against a corpus with these `counts` [V]."""

    def __init__(self, counts: np.ndarray, context: int, device: torch.device):
        smoothed = counts + 1.0
        self._surprise = torch.tensor(np.log(smoothed.sum()) - np.log(smoothed), device=device)
        self._vocabulary = len(counts)
        # A table, because a CPU rounds a logarithm by where its argument stands in the batch.
        self._logarithms = torch.tensor(np.log(np.arange(1, context + 2)), device=device)

    def surprise(self, tokens: Tensor) -> Tensor:
        """Of each token, [..., T+1]."""
        return self._surprise.index_select(0, tokens.reshape(-1)).view(tokens.shape)

    def rarity(self, tokens: Tensor) -> Tensor:
        return sums.mean(self.surprise(tokens))

    def repetition(self, tokens: Tensor) -> Tensor:
        pairs = ordered(tokens[..., :-1] * self._vocabulary + tokens[..., 1:])
        repeated = (pairs[..., 1:] == pairs[..., :-1]).sum(-1)
        return repeated.double() / pairs.shape[-1]

    def entropy(self, tokens: Tensor) -> Tensor:
        rising = ordered(tokens)
        count = torch.searchsorted(rising, rising, right=True) - torch.searchsorted(rising, rising)
        return sums.mean(self._logarithms[-1] - self._logarithms[count - 1])


CRITERIA: dict[str, tuple[Callable[[Scores, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "rarity": (Scores.rarity, torch.gt),
    "repetition": (Scores.repetition, torch.gt),
    "entropy": (Scores.entropy, torch.lt),
}
"""A score, and how it compares with its threshold where a sequence is dropped; by the threshold's field of `screen`."""


class Screening:
    """Drops sequences of a pack's batches; nothing at all where its trials have no threshold.

    After a call, `dropped` counts the sequences that each row has lost, [R], `trains` says which rows have any left,
    [R], and `beyond` by criterion which have lost any to it, [R].
    """

    def __init__(self, trials: Sequence[Trial], corpus: Corpus, device: torch.device):
        self.criteria = [name for name in CRITERIA if getattr(trials[0].screen, name) is not None]
        self.records: list[list[dict[str, Any]]] = [[] for _ in trials]
        self.beyond: dict[str, Tensor] = {}
        # What each step dropped, on the device until the host looks: steps of the rows, planned trials, whether it was
        # beyond the threshold and the score, [criteria, R, B].
        self._pending: list[tuple[Sequence[int], Sequence[int], Tensor, Tensor]] = []
        self._device = device
        if self.criteria:
            self._scores = Scores(corpus.counts, trials[0].model.context, device)

    def bind(self, trials: Sequence[Trial], planned: Sequence[int]) -> None:
        """Screen for these rows from now on: their trials, and their numbers in the pack as planned."""
        self._planned = tuple(planned)
        self.dropped = torch.zeros(len(trials), dtype=torch.int64, device=self._device)
        self.trains = torch.ones(len(trials), dtype=torch.bool, device=self._device)
        limits = [[[getattr(trial.screen, name)] for trial in trials] for name in self.criteria]
        self._limits = torch.tensor(limits, dtype=torch.float64, device=self._device)

    def __call__(
        self, batch_RxBxT1: Tensor, steps: int | Sequence[int], active_R: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The batch without what is dropped, and the weight of each sequence, float64 [R, B]; None: all count alike.

        A weight is 0 for what is dropped, and B over the number that is kept for the others, so that the mean over the
        batch, or over equal ranks of it, is that over what is kept. In place of a sequence that is dropped stands the
        first that is not: one full of NaN could otherwise reach the gradients of weights, as 0 x NaN.
        """
        if not self.criteria:
            return batch_RxBxT1, None
        criteria = [CRITERIA[name] for name in self.criteria]
        scores = torch.stack([score(self._scores, batch_RxBxT1) for score, _ in criteria])
        compared = zip(criteria, scores, self._limits, strict=True)
        beyond = torch.stack([is_beyond(score, limit) for (_, is_beyond), score, limit in compared])
        kept = ~beyond.any(0)
        left = kept.sum(1)
        self.beyond = dict(zip(self.criteria, beyond.any(2), strict=True))
        self.dropped, self.trains = kept.shape[1] - left, left > 0
        of_rows = [steps] * len(batch_RxBxT1) if isinstance(steps, int) else steps
        self._pending.append((of_rows, self._planned, beyond & active_R[:, None], scores))
        first = kept.int().argmax(1)
        stand_in = batch_RxBxT1[torch.arange(len(kept), device=kept.device), first][:, None]
        weights = kept.double() * (kept.shape[1] / left.clamp(min=1).double())[:, None]
        return torch.where(kept[..., None], batch_RxBxT1, stand_in), weights

    def collect(self) -> None:
        """Keep records of what was dropped since the last time; here the host waits for the device."""
        for steps, planned, beyond, scores in self._pending:
            for sequence, row, criterion in beyond.permute(2, 1, 0).nonzero().tolist():
                records = self.records[planned[row]]
                if len(records) < KEPT_EVENTS:
                    score, name = scores[criterion, row, sequence].item(), self.criteria[criterion]
                    records.append({"step": steps[row], "sequence": sequence, "criterion": name, "score": score})
        self._pending.clear()

    def forget(self, number: int, step: int) -> None:
        """A planned trial goes back to this step: what it dropped since is none of its history."""
        self.collect()
        self.records[number] = [record for record in self.records[number] if record["step"] < step]

    def restore(self, records: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Go back to these records of each planned trial."""
        self.records = [list(of_trial) for of_trial in records]
        self._pending.clear()
