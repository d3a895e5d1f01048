"""Whether a batch may be one of a text: how likely its sequences are among those drawn from it.

A sequence, [T + 1] tokens, has two scores: its mean surprise under a model of pairs of tokens, and the share of its
pairs that have stood in it before. Pairs are counted in the validation text, on which nothing trains, by absolute
discounting (Ney, Essen & Kneser 1994, Computer Speech & Language 8, equation 14): p(b | a) = max(c(ab) - D, 0) / c(a) +
D N(a) / c(a) p(b), with N(a) the number of tokens that follow a. Text is filtered by such a surprise elsewhere, too
(Wenzek et al. 2019, arXiv 1911.00359, section 4.2).

The likelihood of a batch is the product of the densities of its sequences' scores in the training text. Where few
sequences are drawn, since they are long, one that is near none of them is less likely than all: of bytes, 1,025 a
sequence, that is one in some 4,000.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from harness.data.corpus import Corpus
from harness.data.screening import Scores

DISCOUNT = 0.75  # D
MOST_TOKENS = 2**24  # that are drawn of a text, and read of its validation part
STRETCHES = 64  # in which a longer validation part is read
BATCHES, SEQUENCES = 200_000, 2**25  # that are put together at most
NEAR = np.array([0.3, 0.1])  # nat/token, and share of pairs: scores as near as that are alike
CELLS = 5  # of the grid on which scores are counted, in a box of 2 NEAR
NONE_ALIKE = 0.5  # stands for a count of 0
ROUNDING = 1e-6  # of a log-likelihood, which is a sum in some order


class PairModel:
    """p(next token | token) of a corpus: pairs are those of its validation part, single tokens of its training part."""

    def __init__(self, corpus: Corpus):
        text, self._vocabulary = _stretches(corpus.validation).astype(np.int64), corpus.vocabulary
        self.tokens = len(text)
        codes, self._counts = np.unique(text[:-1] * self._vocabulary + text[1:], return_counts=True)
        self._codes = codes
        before = np.bincount(text[:-1], minlength=self._vocabulary)
        followers = np.bincount(codes // self._vocabulary, minlength=self._vocabulary)
        self._contexts = np.maximum(before, 1)
        self._backoff = np.where(before, DISCOUNT * followers / self._contexts, 1.0)
        self._unigram = (corpus.counts + 1.0) / (corpus.counts.sum() + self._vocabulary)

    def surprise(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Mean of -log p of the tokens after the first, nat/token, of sequences [n, T + 1]: [n]."""
        first, second = sequences[:, :-1], sequences[:, 1:]
        wanted = first * self._vocabulary + second
        place = np.searchsorted(self._codes, wanted).clip(max=max(0, len(self._codes) - 1))
        counts = np.where(self._codes[place] == wanted, self._counts[place], 0) if len(self._codes) else 0 * wanted
        seen = np.maximum(counts - DISCOUNT, 0) / self._contexts[first]
        return np.asarray(-np.log(seen + self._backoff[first] * self._unigram[second]).mean(1))


class Likeness:
    """The likelihood of batches of sequences of `length` = T + 1 tokens, against those drawn from `corpus.train`."""

    def __init__(self, corpus: Corpus, length: int):
        self._pairs = _pair_model(corpus)
        self._scores = Scores(corpus.counts, length, torch.device("cpu"))
        count = max(1, MOST_TOKENS // length)
        starts = np.random.default_rng(0).integers(0, len(corpus.train) - length + 1, count)
        pieces = np.array_split(starts, max(1, count * length >> 20))
        drawn = np.concatenate([self._scored(corpus.train[some[:, None] + np.arange(length)]) for some in pieces])
        self._least = drawn.min(0) - NEAR
        cells = self._cells(drawn)
        counts = np.zeros(cells.max(0) + 1 + CELLS // 2, np.int64)
        np.add.at(counts, tuple(cells.T), 1)
        self._alike = sliding_window_view(np.pad(counts, CELLS // 2), (CELLS, CELLS)).sum((2, 3))
        self._logs = self._log_density(drawn)
        self._by_size: dict[int, npt.NDArray[np.float64]] = {}

    def share_as_unlikely(self, batch: npt.NDArray[np.int64]) -> float:
        """The share of batches of the text, of as many sequences as this one [B, T + 1], that are at most as likely."""
        own = self.sequence_log_likelihoods(batch).sum()
        if len(batch) not in self._by_size:
            self._by_size[len(batch)] = self._drawn_batches(len(batch))
        drawn = self._by_size[len(batch)]
        return float(np.searchsorted(drawn, own + ROUNDING, "right") / len(drawn))

    def sequence_log_likelihoods(self, batch: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Of each sequence of [B, T + 1], [B]: the logarithm of how many of those drawn from the text are alike."""
        return self._log_density(self._scored(batch))

    def _drawn_batches(self, sequences: int) -> npt.NDArray[np.float64]:
        """Log-likelihoods of batches of so many sequences, rising."""
        if sequences == 1:
            return np.sort(self._logs)
        drawn, rng = np.zeros(max(1, min(BATCHES, SEQUENCES // sequences))), np.random.default_rng(1)
        for _ in range(sequences):
            drawn += self._logs[rng.integers(0, len(self._logs), len(drawn))]
        return np.sort(drawn)

    def _scored(self, sequences: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """Both scores of sequences [n, T + 1]: [n, 2]."""
        tokens = sequences.astype(np.int64)
        repetition = self._scores.repetition(torch.from_numpy(tokens)).numpy()
        return np.stack([self._pairs.surprise(tokens), repetition], 1)

    def _cells(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        return np.asarray(np.floor((scores - self._least) / (2 * NEAR / CELLS)), np.int64)

    def _log_density(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of [n, 2], the logarithm of how many of those drawn are alike: [n]."""
        cells, size = self._cells(scores), np.array(self._alike.shape)
        is_within = ((cells >= 0) & (cells < size)).all(1)
        counts = self._alike[tuple(cells.clip(0, size - 1).T)]
        return np.asarray(np.log(np.where(is_within, np.maximum(counts, NONE_ALIKE), NONE_ALIKE)))


def _stretches(text: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    if len(text) <= MOST_TOKENS:
        return text
    size = MOST_TOKENS // STRETCHES
    starts = np.linspace(0, len(text) - size, STRETCHES).astype(np.int64)
    return np.concatenate([text[start : start + size] for start in starts])


_pair_model = lru_cache(maxsize=2)(PairModel)
likeness_of = lru_cache(maxsize=4)(Likeness)
"""`Likeness` of a corpus and a length, made once."""
