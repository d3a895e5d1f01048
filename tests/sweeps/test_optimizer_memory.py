"""What a plan counts for arrays of an optimizer beside two moments."""

from __future__ import annotations

import pytest

from harness.memory.optimizer_arrays import optimizer_bytes
from harness.optim.optimizers import OPTIMIZERS
from harness.testing import engine
from sweeps.planning.planner import snapshot_bytes, state_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plan_counts_all_that_an_optimizer_keeps(name: str) -> None:
    trial, pack = engine.trial(name=name), engine.pack_of([engine.trial(name=name)])
    optimizer = pack.optimizer
    beside = max(0, len(optimizer.slots) - 2) * pack.layout.elements
    beside += sum(optimizer.slot(of_tensors).shape[1] for of_tensors in optimizer.tensor_slots)
    assert optimizer_bytes(trial) == beside * pack.weights.itemsize
    assert state_bytes(trial) == state_bytes(engine.trial(name="adamw")) + optimizer_bytes(trial)


def test_a_snapshot_has_it_too() -> None:
    ladder = {"ladder": '[{"detector": "any", "action": "roll_back"}]'}
    soap, adamw = (engine.trial(name=name, width=64, playbook=ladder) for name in ("soap", "adamw"))
    kept = soap.section("playbook.snapshot").kept
    assert optimizer_bytes(soap) > state_bytes(adamw)
    assert snapshot_bytes(soap, "cpu") == snapshot_bytes(adamw, "cpu") + kept * optimizer_bytes(soap)
