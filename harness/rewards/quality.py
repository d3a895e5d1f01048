"""Fluent text without repetition: a dense reward whose best completions nobody can write down."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from harness.config import Trial
from harness.data.corpus import Corpus
from harness.model import sums
from harness.rewards.base import Reward, repeated

LARGEST = 2048  # tokens of a vocabulary, of whose pairs there is a table in float64


class Quality(Reward):
    """(1 + f - r) / 2, from 0 to 1, of the fluency f of a completion and of what it repeats, r.

    f is 1 - L / L_min, with L the mean log-probability of the completion's tokens, each after the one before it, under
    a bigram model of the training text, and L_min that of the least likely pair: 0 where all pairs are the least
    likely one, 1 where all are certain. The model is p(b | a) = (n_ab + 1) / (n_a + V), with n the counts of the text
    and V the vocabulary (Laplace's rule). r is the share of the completion's pairs that it had before.
    """

    help = "log-probability under a bigram model of the training text, minus repetition"

    def read(self, corpus: Corpus) -> None:
        counts = corpus.pair_counts.astype(np.float64)
        found = np.log(counts + 1) - np.log(counts.sum(1, keepdims=True) + len(counts))
        self._least = float(found.min())
        self._log_p = torch.from_numpy(found).flatten().to(self.device)

    def quality(self, prompts_RxBxP: Tensor, completions_RxBxT: Tensor, mask_RxBxT: Tensor) -> Tensor:
        before = torch.cat((prompts_RxBxP[..., -1:], completions_RxBxT[..., :-1]), -1)
        log_p = torch.where(mask_RxBxT, self._log_p[before * self.vocabulary + completions_RxBxT], 0.0)
        fluency = 1 - sums.total(log_p) / mask_RxBxT.sum(-1) / self._least
        return (1 + fluency - repeated(completions_RxBxT, mask_RxBxT)) / 2

    @classmethod
    def refused(cls, trial: Trial, prompt: int, completion: int) -> Iterator[str]:
        if (vocabulary := trial.data.vocabulary) > LARGEST:
            yield f"policy.reward=quality: data.vocabulary={vocabulary} has too many pairs; allowed: up to {LARGEST}"
