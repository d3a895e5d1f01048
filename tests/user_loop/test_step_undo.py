"""What an update changed is taken back bit for bit, also where a snapshot of the step has the optimizer's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness.user_loop.loop_state import LoopState
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.snapshots import Keeper, StepUndo, difference

Change = Callable[[torch.optim.Optimizer], Any]


def _first(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return next(iter(optimizer.state.values()))


CHANGES: dict[str, Change] = {
    "nothing": lambda optimizer: None,
    "in place": lambda optimizer: _first(optimizer)["exp_avg"].mul_(0.5),
    "another tensor": lambda optimizer: _first(optimizer).update(exp_avg=torch.ones_like(_first(optimizer)["exp_avg"])),
    "one more": lambda optimizer: _first(optimizer).update(mine=7),
    "a value": lambda optimizer: _first(optimizer).update(count=_first(optimizer)["count"] + 1),
    "a list": lambda optimizer: _first(optimizer)["seen"].append(4),
    "all gone": lambda optimizer: optimizer.state.clear(),
    "loaded": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_loop_changed_before_the_update_stays_and_the_update_goes(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    places = NamedTensors(model, [optimizer])
    keeper, undo = Keeper(places, [], LoopState()), StepUndo(places, [], LoopState())
    taken = None
    for step in range(4):
        if step == 2:
            _first(optimizer).update(count=300, **({"seen": [1, 2]} if change == "a list" else {}))
        taken = keeper.take(step, taken)
        at_begin = keeper.take(step)
        undo.begin(taken)
        model(torch.randn(5, 3)).square().sum().backward()
        if step >= 2:
            CHANGES[change](optimizer)
        with torch.no_grad():
            model[0].weight.data.clamp_(-0.3, 0.3)  # as one that clips its weights before the update does
        before = keeper.take_arrays(step)
        buffers = {name: values.clone() for name, values in at_begin.tensors.items() if name.startswith("buffer")}
        undo.keep()
        optimizer.step()
        if step == 3:
            undo.take_back()
            before.tensors.update(buffers)
            assert difference(keeper.take_arrays(step), before, only_arrays=True) is None
        assert difference(taken, at_begin, only_arrays=True) is None  # lent, and not written to


def test_a_step_that_the_snapshot_served_leaves_memory_of_its_own_to_the_next() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    places = NamedTensors(model, [optimizer])
    keeper, undo = Keeper(places, [], LoopState()), StepUndo(places, [], LoopState())
    for is_taken in (False, True, False, True, True, False):
        taken = keeper.take(0) if is_taken else None
        there = keeper.take_arrays(0)
        undo.begin(taken)
        model(torch.randn(5, 3)).square().sum().backward()
        undo.keep()
        optimizer.step()
        if taken:
            assert difference(taken, there, only_arrays=True) is None
    undo.take_back()
    assert difference(keeper.take_arrays(0), there, only_arrays=True) is None
