"""What an update changed is taken back bit for bit, also where a snapshot of the step has the optimizer's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness import attach
from harness.user_loop.loop_state import LoopState
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.recovery_session import Ring
from harness.user_loop.snapshots import Keeper, StepUndo, difference

BACK: dict[str, Any] = {
    "ladder": [{"detector": "any", "action": "roll_back", "limit": 5, "cool_down": 5}],
    "snapshot": {"every": 1, "kept": 3},
}
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


@pytest.mark.filterwarnings("ignore")  # a run that ends with nothing left to do says so
@pytest.mark.parametrize("where", ["between epochs", "after the update", "before the update", "nowhere"])
@pytest.mark.parametrize("what", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_no_snapshot(what: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of a step's end stand for what comes next only where none of the loop's own code ran since."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen: list[tuple[bool, bool, bool]] = []  # of each step: measured as the one before ended, sound, and kept
    take = Ring.take

    def watched(ring: Ring, step: int, *args: Any) -> Any:
        arrays = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
        is_sound = all(bool(x.isfinite().all()) for x in arrays)
        kept = take(ring, step, *args)
        seen.append((args[-1], is_sound, kept is not None))
        return kept

    monkeypatch.setattr(Ring, "take", watched)

    def spoil(here: str) -> None:
        if here == where and len(seen) == 4:
            struck = model.weight if what == "weight" else optimizer.state[model.weight][what]
            struck.data[0, 0] = torch.inf

    with attach(model, optimizer, steps=8, twin=False, detect="finite", recover=BACK) as run:
        for _ in run.epochs(2):
            for x in run.steps([torch.randn(5, 3) for _ in range(4)]):
                loss = model(x).square().sum()
                optimizer.zero_grad()
                loss.backward()
                spoil("before the update")
                optimizer.step()
                spoil("after the update")
                run.observe(loss)
            spoil("between epochs")
    measured, sound, kept = zip(*seen, strict=True)
    assert any(measured) and not measured[0] and any(kept)
    assert all(is_sound for is_sound, is_kept in zip(sound, kept, strict=True) if is_kept)
    assert all(sound) == (where == "nowhere")
    if where == "nowhere":
        assert measured == (False, True, True, True, False, True, True, True) and all(kept)
