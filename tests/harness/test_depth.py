"""Forty-eight narrow blocks: which placements of norms train them (Wang et al. 2022, arXiv 2203.00555, figure 1)."""

from __future__ import annotations

import numpy as np
import pytest

from harness.corpus import Corpus

SEEDS = range(2)
DEEP = {
    "width": 16,
    "head_dim": 16,
    "depth": 48,
    "context": 32,
    "batch": 4,
    "steps": 160,
    "lr": 5e-3,
    "warmup": 20,
    "validate_every": 160,
    "validate_batches": 32,
    "source": "stdlib",
}


def without_context(corpus: Corpus) -> float:
    """The loss on the validation text of whoever knows how frequent tokens are and nothing else, nat/token."""
    trained = np.bincount(corpus.train, minlength=corpus.vocabulary) + 1
    seen = np.bincount(corpus.validation, minlength=corpus.vocabulary)
    return float(-(seen * np.log(trained / trained.sum())).sum() / seen.sum())


@pytest.mark.parametrize(("placement", "trains"), [("pre", True), ("deepnorm", True), ("post", False)])
def test_post_ln_learns_no_context_where_pre_ln_and_deepnorm_do(engine, placement: str, trains: bool) -> None:
    run = engine.run([engine.trial(seed=seed, placement=placement, **DEEP) for seed in SEEDS])
    below = without_context(run.corpus) - run.signals["validation_loss"][:, -1]
    assert np.isfinite(below).all()
    assert (below > 0.15).all() if trains else (below < 0.05).all(), below
