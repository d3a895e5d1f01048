"""Forty-eight narrow blocks: which placements of norms train them (Wang et al. 2022, arXiv 2203.00555, figure 1)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.data.corpus import Corpus
from harness.testing import engine
from tests.harness.texts import raw

SEEDS = range(3)
DEEP = {
    "width": 16,
    "head_dim": 16,
    "depth": 48,
    "context": 16,
    "batch": 16,
    "steps": 16,
    "lr": 1.5e-2,
    "warmup": 4,
    "decay": "constant",
    "validate_every": 16,
    "validate_tokens": 512,
    "source": "tokens",
    "vocabulary": 16,
}


def write_walk(path: Path) -> None:
    """Tokens of which four in five follow from the one before; all are equally frequent."""
    draw = np.random.default_rng(0)
    walk, is_free = draw.integers(0, 16, 100_000), draw.random(100_000) < 0.2
    for i in np.flatnonzero(~is_free)[1:]:
        walk[i] = (5 * walk[i - 1] + 1) % 16
    path.write_bytes(raw(walk))


def without_context(corpus: Corpus) -> float:
    """The loss on the validation text of whoever knows how frequent tokens are and nothing else, nat/token."""
    trained = np.bincount(corpus.train, minlength=corpus.vocabulary) + 1
    seen = np.bincount(corpus.validation, minlength=corpus.vocabulary)
    return float(-(seen * np.log(trained / trained.sum())).sum() / seen.sum())


@pytest.mark.parametrize(("placement", "trains"), [("pre", True), ("deepnorm", True), ("post", False)])
def test_post_ln_learns_no_context_where_pre_ln_and_deepnorm_do(tmp_path, placement: str, trains: bool) -> None:
    write_walk(tmp_path / "walk.bin")
    fields = {**DEEP, "placement": placement, "path": str(tmp_path / "walk.bin")}
    run = engine.run([engine.trial(seed=seed, **fields) for seed in SEEDS], block=DEEP["steps"], telemetry=False)
    below = without_context(run.corpus) - run.signals["validation_loss"][:, -1]
    assert np.isfinite(below).all()
    assert (below > 0.15).all() if trains else (below < 0.05).all(), below
