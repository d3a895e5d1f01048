"""How likely a batch is among those of its text: calibrated on what the text has, and sure of what it has not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.config import Data
from harness.data.corpus import Corpus, load_corpus
from harness.data.likeness import DISCOUNT, MOST_TOKENS, Likeness, PairModel, likeness_of

SHAPES = [(1, 33), (2, 49), (8, 33), (1, 129)]
BPE = Data(source="stdlib", tokenizer="bpe", vocabulary=512)
TEXTS = [Data(source="stdlib"), BPE, Data(source="zipf", vocabulary=512, length=200_000)]


def windows(corpus: Corpus, sequences: int, length: int, seed: int) -> np.ndarray:
    starts = np.random.default_rng(seed).integers(0, len(corpus.train) - length + 1, sequences)
    return corpus.train[starts[:, None] + np.arange(length)].astype(np.int64)


@pytest.mark.parametrize(("sequences", "length"), SHAPES)
@pytest.mark.parametrize("data", TEXTS, ids=["bytes", "bpe", "zipf"])
def test_of_the_batches_of_a_text_as_many_are_unlikely_as_it_says(data: Data, sequences: int, length: int) -> None:
    """Shares of 2,000 others than those that were counted: 2% are among the 2% that are least likely, and so on.

    Within a sixth, since scores are counted in cells, and four standard errors.
    """
    corpus = load_corpus(data, length - 1)
    likeness = likeness_of(corpus, length)
    shares = [likeness.share_as_unlikely(windows(corpus, sequences, length, seed)) for seed in range(10, 2010)]
    for share in (0.02, 0.1):
        error = np.sqrt(share * (1 - share) / 2000)
        assert abs(np.mean(np.array(shares) <= share) - share) < share / 6 + 4 * error, share
    assert np.mean(np.array(shares) <= 1e-4) <= 1e-3


def rare(corpus: Corpus, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    return np.argsort(corpus.counts)[:16][rng.integers(0, 16, shape)]


def drawn(corpus: Corpus, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, corpus.vocabulary, shape)


def shuffled(corpus: Corpus, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Ordinary tokens, in an order in which they do not stand."""
    return rng.permuted(windows(corpus, *shape, seed=int(rng.integers(2**31))), axis=1)


@pytest.mark.parametrize(
    ("data", "made"), [(TEXTS[0], rare), (TEXTS[0], drawn), (BPE, rare), (BPE, drawn), (BPE, shuffled)]
)
def test_what_a_text_has_not_is_less_likely_than_all_of_it(
    data: Data, made: Callable[[Corpus, tuple[int, int], np.random.Generator], np.ndarray]
) -> None:
    corpus, rng = load_corpus(data, 48), np.random.default_rng(3)
    shares = [likeness_of(corpus, 49).share_as_unlikely(made(corpus, (2, 49), rng)) for _ in range(50)]
    assert np.quantile(shares, 0.9) < 1e-4, shares


def test_a_batch_of_two_is_told_by_both_sequences() -> None:
    """A window that is rare by itself comes by beside an ordinary one, and not beside another such."""
    corpus = load_corpus(BPE, 48)
    likeness, many = likeness_of(corpus, 49), windows(corpus, 50_000, 49, 5)
    by_itself = likeness.sequence_log_likelihoods(many)
    order = by_itself.argsort()
    rarest, ordinary = many[order[20:22]], many[order[25_000:25_001]]  # one in 2,500, and one in two
    with_ordinary = likeness.share_as_unlikely(np.concatenate([rarest[:1], ordinary]))
    assert with_ordinary > 1e-4 > likeness.share_as_unlikely(rarest)


def test_of_long_sequences_few_are_odd_though_few_were_drawn() -> None:
    """16,368 windows of 1,025 bytes: one in some 4,000 is near none of them, and what the text has not still is."""
    corpus, rng = load_corpus(Data(source="stdlib"), 1024), np.random.default_rng(3)
    likeness = likeness_of(corpus, 1025)
    shares = [likeness.share_as_unlikely(windows(corpus, 1, 1025, seed)) for seed in range(10, 2010)]
    assert np.mean(np.array(shares) < 1e-4) <= 3e-3
    assert all(likeness.share_as_unlikely(made(corpus, (1, 1025), rng)) == 0.0 for made in (rare, drawn))


def test_the_model_of_pairs_is_a_distribution_whose_pairs_are_of_the_validation_text() -> None:
    corpus = load_corpus(Data(source="zipf", vocabulary=64, length=5000, validation=0.2), 8)
    model = PairModel(corpus)
    pairs = np.stack(np.meshgrid(np.arange(64), np.arange(64), indexing="ij"), -1).reshape(-1, 2)
    shares = np.exp(-model.surprise(pairs)).reshape(64, 64)
    np.testing.assert_allclose(shares.sum(1), 1.0, rtol=1e-12)
    text = corpus.validation.astype(np.int64)
    first = int(text[0])
    followers = text[1:][text[:-1] == first]
    count, after = np.sum(followers == text[1]), len(followers)
    alone = (corpus.counts[text[1]] + 1) / (corpus.counts.sum() + 64)
    wanted = (count - DISCOUNT) / after + DISCOUNT * len(np.unique(followers)) / after * alone
    assert shares[first, text[1]] == pytest.approx(wanted, rel=1e-12)


def test_a_text_too_short_to_draw_a_batch_in_ten_thousand_from() -> None:
    """One of its few windows is like it, however it was drawn; what it has not is not."""
    corpus = load_corpus(Data(source="zipf", vocabulary=64, length=400, validation=0.5), 100)
    likeness = Likeness(corpus, 101)
    assert all(likeness.share_as_unlikely(windows(corpus, 1, 101, seed)) > 0 for seed in range(50))
    assert likeness.share_as_unlikely(np.full((1, 101), 63)) == 0.0


def test_a_long_validation_text_is_read_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.data.likeness.MOST_TOKENS", 64 * 64)
    corpus = load_corpus(Data(source="zipf", vocabulary=64, length=200_000, validation=0.5), 8)
    model = PairModel(corpus)
    assert MOST_TOKENS > 64 * 64 == model.tokens < len(corpus.validation)
    pairs = np.stack([np.zeros(64, np.int64), np.arange(64)], 1)
    assert np.exp(-model.surprise(pairs)).sum() == pytest.approx(1.0, rel=1e-12)
