"""Last weights are handed over once for each trial, whatever became of its row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import Tensor

from harness.loop.loop import train
from harness.storage.checkpoint import Checkpoints
from harness.storage.results_folder import ResultsPath
from harness.testing import engine
from harness.testing.engine import Dying, Killed
from harness.training.sites import FaultSchedule
from injectors.value import Value

STEPS = 14


def change(start: int, model: str, value: float = 1.0, tensor: str = "head") -> Value:
    return Value(kind="value", name="value", site="weight", tensor=tensor, start=start, model=model, value=value)


FAULTS = {
    "golden": None,
    "masked": change(2, "scale", 1.0),
    "lasting": change(3, "scale", 3.0),
    "lost early": change(1, "nan"),
    "lost late": change(9, "nan"),
    "begins at the last step": change(STEPS - 1, "scale", 2.0),
}


def trials_of(rate: float = 3e-2):
    """A golden trial and its faults, and another with faults that freezes before one of them begins."""
    golden, other = (engine.trial(seed=seed, steps=STEPS, lr=rate) for seed in (0, 1))
    own = [golden if fault is None else dataclasses.replace(golden, fault=fault) for fault in FAULTS.values()]
    # The second golden trial has a rate at which its weights overflow.
    wild = dataclasses.replace(other, optim=dataclasses.replace(other.optim, lr=1e30))
    return [*own, wild, dataclasses.replace(wild, fault=change(11, "scale", 2.0))]


def handed(trials, forks: bool, folder: Path | None = None, kills=()) -> dict[int, dict[str, Tensor]]:
    """What is handed over, with the last of several for the same trial, by each process there is."""
    found: dict[int, dict[str, Tensor]] = {}
    place = None if folder is None else ResultsPath.at(folder)

    def once(checkpoints: Checkpoints | None) -> None:
        fault_schedule, seen = FaultSchedule([engine.injector_of(trial) for trial in trials]), []
        pack = engine.pack_of(trials, fault_schedule.first if forks else None)

        def leave(number: int, tensors) -> None:
            seen.append(number)
            found[number] = {name: values.clone() for name, values in tensors.items()}

        saved = Checkpoints(place).newest() if place else None
        train(pack, fault_schedule, 2, lambda first, signals: None, checkpoints=checkpoints, saved=saved, leave=leave)
        assert len(seen) == len(set(seen)), "handed over twice"

    for kill in kills:
        with pytest.raises(Killed):
            once(Dying(place, every=1, dies_at=kill))
    once(None)
    return found


@pytest.mark.parametrize("forks", [False, True])
def test_each_trial_leaves_what_it_has_in_a_pack_that_keeps_all_rows(monkeypatch, forks: bool) -> None:
    trials = trials_of()
    found = handed(trials, forks)
    assert found.keys() == set(range(len(trials)))
    monkeypatch.setattr("harness.loop.loop.SHRINK_SHARE", 2.0)  # nothing goes
    whole = handed(trials, False)
    for number in range(len(trials)):
        assert engine.same_bits(found[number], whole[number]) == [], number
    numbers = dict(zip(FAULTS, range(len(FAULTS)), strict=True))
    golden = found[0]
    assert engine.same_bits(found[numbers["masked"]], golden) == []
    for name in ("lasting", "lost early", "lost late", "begins at the last step"):
        assert engine.same_bits(found[numbers[name]], golden) != [], name
    assert engine.same_bits(found[len(trials) - 2], found[len(trials) - 1]) == [], "it never came to its fault"


def test_killed_ones_leave_the_same(tmp_path) -> None:
    """Rows that went before a checkpoint have been handed over by the process that was killed after it."""
    trials = trials_of()
    (tmp_path / "checkpoints").mkdir()
    whole, resumed = handed(trials, True), handed(trials, True, tmp_path / "checkpoints", (5, 12))
    assert resumed.keys() == whole.keys()
    for number, own in whole.items():
        assert engine.same_bits(resumed[number], own) == [], number


def test_without_it_nothing_changes() -> None:
    trials = trials_of()
    fault_schedule = FaultSchedule([engine.injector_of(trial) for trial in trials])
    pack = engine.pack_of(trials, fault_schedule.first)
    result = train(pack, fault_schedule, 2, lambda first, signals: None)
    again = FaultSchedule([engine.injector_of(trial) for trial in trials])
    other = engine.pack_of(trials, again.first)
    assert result == train(other, again, 2, lambda first, signals: None, leave=lambda number, tensors: None)
    assert engine.same_bits({"weights": pack.weights}, {"weights": other.weights}) == []
