"""The ways of an accelerator, taken on a CPU: the same values as a CPU's own, and the same promises.

Idle slots, parts of one size, and the code that has another way for CPUs. What only a GPU can show is in tests/gpu/.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from harness.basics import devices
from harness.storage.results_folder import ResultsPath
from harness.testing import engine
from harness.testing.settings import BLOCK, GOLDEN, IDLE, RUINS, SMALL, STRIKES, SavedOnce, roughen
from tests.harness.features import FEATURES
from tests.harness.test_conformance import promises

HALF = ("bf16", "fp16", "fp8")  # which a CPU emulates, and an accelerator has
# Steps that are alike: which eigenvectors belong to zero is rounding, until gradients have filled all directions.
ALIKE = {"optimizer: soap": 1}
EXACT = [name for name, fields in FEATURES.items() if fields.get("precision") not in HALF]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPUS", ())


@pytest.mark.parametrize("feature", EXACT[::2])
def test_its_values_are_those_of_a_cpu(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = engine.different(GOLDEN, **{"warmup": 1, **SMALL, **FEATURES[feature], "precision": "fp64"})
    ours = engine.run(trials, prepare=roughen)
    monkeypatch.setattr(devices, "CPUS", ())
    theirs = engine.run(trials, prepare=roughen)
    assert theirs.pack.slots.count == 8 > len(trials)
    for name, values in ours.signals.items():
        if name not in ("tokens_per_second", "step_seconds"):
            rtol = 1e-7 if name == "qk_rank" else 1e-9  # of eigenvalues that are nearly equal
            found, expected = (x[:, : ALIKE.get(feature)] for x in (theirs.signals[name], values))
            np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-12, err_msg=name)
    if feature in ALIKE:
        return
    torch.testing.assert_close(theirs.pack.weights[: len(trials)], ours.pack.weights, rtol=1e-9, atol=1e-12)
    assert theirs.result.acts == ours.result.acts
    for dropped, expected in zip(theirs.result.dropped, ours.result.dropped, strict=True):
        assert dropped == [one | {"score": pytest.approx(one["score"], rel=1e-12)} for one in expected]


@pytest.mark.parametrize("feature", EXACT[::3])
@pytest.mark.usefixtures("accelerator")
def test_forks_equal_full_runs_and_go_on_from_checkpoints(feature: str, tmp_path: Path) -> None:
    """A trial that is its twin again is so since the same step, though the host asks once a block."""
    trials, checkpoints = promises(feature).family, SavedOnce(ResultsPath.at(tmp_path))
    whole = engine.run(trials, block=BLOCK, prepare=roughen)
    forked = engine.assert_fork_equals_full_run(trials, whole, prepare=roughen, block=BLOCK, checkpoints=checkpoints)
    assert forked.pack.twins.begins[GOLDEN:] == [fault["start"] for fault in STRIKES]
    assert forked.result.masked_step == [4 if number == IDLE else None for number in range(len(trials))]
    engine.assert_same_end(engine.resumed(trials, tmp_path, [], BLOCK, forks=True), forked, 3)


@pytest.mark.parametrize(
    "feature", [*(name for name in EXACT[::8] if "block" not in FEATURES[name]), "plain", "detectors"]
)
@pytest.mark.usefixtures("accelerator")
def test_ruined_trials_change_no_bit_of_the_others(feature: str) -> None:
    golden = promises(feature).trials()
    beside = [each for pair in zip(golden, reversed(golden), strict=True) for each in pair]
    plain = engine.run(golden, prepare=roughen)
    ruined = engine.run(beside, {2 * number + 1: ruin for number, ruin in enumerate(RUINS)}, roughen)
    assert (len(plain.pack.parts), len(ruined.pack.parts)) == (1, 1)
    engine.assert_same_trials(plain, ruined, {number: 2 * number for number in range(GOLDEN)})
    assert ruined.result.nonfinite_step[1] == 4
