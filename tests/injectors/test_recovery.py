"""A shorter memory of Adam's second moment recovers sooner from batches of rare tokens (study=recovery, smaller)."""

from __future__ import annotations

import numpy as np

from harness.testing import engine
from injectors.batch import RareTokens

START, DURATION, SEEDS = 70, 3, range(4)
SHAPE = {
    "width": 32,
    "head_dim": 16,
    "depth": 2,
    "context": 32,
    "batch": 8,
    "steps": 140,
    "lr": 1e-2,
    "warmup": 15,
    "decay": "constant",
    "clip": None,
    "validate_every": 140,
    "source": "stdlib",
}


def test_beta2_095_pays_less_for_rare_tokens_than_0999() -> None:
    """In loss above the golden twin's, summed over the steps since; with every seed, and without clipping."""
    fault = RareTokens(start=START, duration=DURATION)
    faulty = [engine.trial(seed=seed, beta2=beta2, fault=fault, **SHAPE) for beta2 in (0.95, 0.999) for seed in SEEDS]
    run = engine.run([*faulty, *(trial.golden for trial in faulty)], forks=True, block=20, telemetry=False)
    loss = run.signals["loss"][:, START + DURATION :]
    paid = (loss[: len(faulty)] - loss[len(faulty) :]).sum(axis=1).reshape(2, len(SEEDS))
    assert np.isfinite(paid).all()
    assert (paid[0] < 0.9 * paid[1]).all(), paid
