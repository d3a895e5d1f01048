"""Weights by which a run is judged and that are not those that train, as Schedule-Free's running mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.loop.loop import hand_over
from harness.testing import engine
from harness.training.pack import Pack

OPTIM = {"lr": (1e-2, 3e-2), "decay": "constant", "warmup": 2, "steps": 12, "validate_every": 6}


def trained(name: str) -> Pack:
    trials = [engine.trial(seed=r, name=name, **engine.in_turn(OPTIM, r)) for r in range(2)]
    return engine.run(trials).pack


def losses(pack: Pack) -> Tensor:
    return pack.validation_losses(512)


def test_validation_is_of_the_judged_weights_and_leaves_those_that_train() -> None:
    pack = trained("schedule_free")
    training, judged = pack.weights.clone(), pack.optimizer.judged()
    assert judged is not None and not torch.equal(judged, training)
    found = losses(pack)
    assert torch.equal(pack.weights, training)
    pack.optimizer.judged = lambda: None  # type: ignore[method-assign]  # as of the others, for what stands there
    at_y = losses(pack)
    pack.weights.copy_(judged)
    assert torch.equal(losses(pack), found) and not torch.equal(at_y, found)


def test_a_validation_that_fails_leaves_the_weights_too() -> None:
    pack = trained("schedule_free")
    training = pack.weights.clone()

    def fails(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        pack.validation_losses(512, fails)
    assert torch.equal(pack.weights, training)


@pytest.mark.parametrize("name", ["adamw", "schedule_free"])
def test_the_judged_weights_are_left_at_the_end(name: str) -> None:
    pack = trained(name)
    expected, left = pack.optimizer.judged(), dict[int, dict[str, Tensor]]()
    expected = pack.weights if expected is None else expected
    hand_over(pack, range(2), lambda trial, tensors: left.update({trial: dict(tensors)}))
    for row in range(2):
        for tensor, values in pack.tensors(expected, row).items():
            assert torch.equal(left[row][tensor], values), tensor


def test_the_mean_ends_lower_than_the_point_that_trains() -> None:
    """What it is for: at a constant rate the iterates jitter, and their mean does not."""
    trials = [
        engine.trial(seed=r, name="schedule_free", lr=0.1, decay="constant", warmup=5, steps=80, validate_every=80)
        for r in range(4)
    ]
    pack = engine.run(trials).pack
    mean = losses(pack).mean(1)
    pack.optimizer.judged = lambda: None  # type: ignore[method-assign]
    assert bool((mean < losses(pack).mean(1)).all())
