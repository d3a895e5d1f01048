"""Rows that go back alone: to a snapshot, without their transient fault, and bit for bit as if never struck."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.config.curriculum import curriculum
from harness.guards import FREEZE, GO, ROLL_BACK, SKIP, Guard, GuardInput, Parts
from harness.guards.base import GuardSignal, answers
from harness.loop.loop import train
from harness.model.state import State
from harness.readings.table import READINGS
from harness.testing.engine import Run, assert_resumes, injector_of, pack_of, run, same_bits, trial
from harness.training import pack as packs
from harness.training.row_steps import RowSteps
from harness.training.sites import FaultSchedule
from injectors.value import Value

STEPS, START, EVERY = 24, 9, 4
OWN = {"steps": STEPS, "lr": 1e-2, "depth": 1}
READ = {"signals": {name: 1 + number % 3 for number, name in enumerate(READINGS)}}


class Alarm(Guard):
    """Asks to go back where the gradient norm is ten times the largest before it, or what is there is not finite."""

    order = 50
    signals = {"norm_over_largest": GuardSignal("1", "gradient norm over the largest before it")}
    every, kept = EVERY, 3

    def __init__(self, parts: Parts):
        super().__init__(parts)
        rows = torch.zeros(parts.rows, dtype=torch.float64, device=parts.device)
        self._largest = parts.state.add("alarm_largest", rows)

    @classmethod
    def is_on(cls, trial) -> bool:
        return True

    def judge(self, seen: GuardInput) -> Tensor:
        largest = self._largest.used
        self._ratio = torch.where(largest > 0, seen.norm / largest, 0.0)
        is_alarm = seen.trains & ~(self._ratio < 10) & (largest > 0)
        largest.copy_(torch.where(seen.trains & ~is_alarm, torch.maximum(largest, seen.norm), largest))
        return answers(is_alarm, ROLL_BACK)

    def shown(self):
        return {"norm_over_largest": self._ratio}


@pytest.fixture(autouse=True)
def alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "GUARDS", [*packs.GUARDS, Alarm])


def flip(start: int = START, duration: int | None = 1, **fields) -> Value:
    """What makes the gradient of one step enormous, and leaves nothing else behind."""
    options = {"site": "reduced_gradient", "tensor": "head", "element": 3, "model": "set", "value": 1e6}
    return Value(start=start, duration=duration, **options | fields)


def last_weights(trials, **options) -> tuple[Run, dict[int, dict[str, Tensor]]]:
    """A run, and each trial's signals and last weights, whatever became of its row."""
    left: dict[int, dict[str, Tensor]] = {}

    def leave(number: int, tensors) -> None:
        left[number] = {name: values.clone() for name, values in tensors.items()}

    found = run(trials, leave=leave, **options)
    signals = {number: {n: x for n, x in found[number].items() if n != "weights"} for number in left}
    return found, {number: signals[number] | left[number] for number in left}


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize(("block", "own"), [(1, OWN), (5, OWN | READ), (STEPS, OWN | READ)])
def test_a_row_that_goes_back_ends_as_if_it_had_never_been_struck(forks: bool, block: int, own: Mapping) -> None:
    golden = [trial(seed=seed, **own) for seed in range(3)]
    struck = [trial(seed=1, fault=flip(), **own), trial(seed=2, fault=flip(START + 3, site="gradient"), **own)]
    found, all_left = last_weights([*golden, *struck], forks=forks, block=block)
    _, plain = last_weights(golden, block=block)
    for number, twin in enumerate((0, 1, 2, 1, 2)):
        assert same_bits(all_left[number], plain[twin]) == [], number
    assert [len(events) for events in found.result.events] == [0, 0, 0, 1, 1]
    assert found.result.digest[3:] == found.result.digest[1:3]


def test_the_optimizers_state_goes_back_too() -> None:
    """The last pass of the last step is what counts: rows of the same seed are equal in all that training changes."""
    found = run([trial(seed=0, **OWN), trial(seed=0, fault=flip(STEPS - 1), **OWN)])
    assert found.pack.rows == [0, 1] and found.pack.rows_state.equal(0, 1)
    assert found.pack.row_steps.steps == [STEPS, STEPS] and found.pack.row_steps.number > STEPS


def test_a_permanent_fault_strikes_again_until_the_row_freezes() -> None:
    fault = flip(duration=None)
    found, left = last_weights([trial(seed=0, fault=fault, **OWN), trial(seed=0, **OWN), trial(seed=1, **OWN)])
    assert found.result.outcome[0] == "non-finite" and found.result.nonfinite_step[0] == START
    assert found.result.strikes[0] == Alarm.most + 1
    _, plain = last_weights([trial(seed=0, **OWN), trial(seed=1, **OWN)])
    assert same_bits(left[1], plain[0]) == same_bits(left[2], plain[1]) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_start": 4, "sequence_steps": 12},
        {"batch_start": 1, "batch_steps": 12},
        {"dropout": 0.2},
        {"placement": "branchnorm", "branch_steps": 20},
        {"rarity": 4.3},
        {"ranks": 2},
        {"precision": "fp16", "loss_scaling": "dynamic"},
        {"clip_tensor": 0.3, "decay": "restarts"},
        {"sigma_reparam": True, "init": "standard"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_batches_rates_and_the_model_follow_the_rows_own_step(fields) -> None:
    """Also where sizes differ from step to step: then the others wait."""
    golden = [trial(seed=seed, **OWN, **fields) for seed in range(2)]
    found, left = last_weights([*golden, trial(seed=1, fault=flip(6), **OWN, **fields)])
    _, plain = last_weights(golden)
    for number, twin in enumerate((0, 1, 1)):
        assert same_bits(left[number], plain[twin]) == [], number
    assert found.result.strikes[2] == 1 and found.pack.row_steps.number > found.pack.steps


def test_a_killed_pack_with_rows_at_different_steps_goes_on_bit_for_bit(tmp_path: Path) -> None:
    struck = [trial(seed=seed, fault=flip(START + seed), **OWN) for seed in range(2)]
    trials = [*struck, *(each.golden for each in struck)]
    assert_resumes(trials, tmp_path, kills=[START + 2, START + 4, STEPS + 1], block=5)


def test_a_block_is_written_once_no_row_stands_in_it() -> None:
    """At the strike in the last step of the second block one row goes back into it, and the others leave it."""
    golden = trial(seed=1, **OWN)
    trials, written = [golden, replace(golden, fault=flip())], []
    pack = pack_of(trials)

    def write(first: int, arrays: Mapping[str, np.ndarray]) -> None:
        assert np.isfinite(arrays["loss"]).all()
        written.append(first)

    train(pack, FaultSchedule([injector_of(each) for each in trials]), 5, write)
    assert written == [0, 5, 10, 15, 20]


def test_guards_show_signals_of_their_own() -> None:
    found = run([trial(seed=0, **OWN), trial(seed=1, **OWN)], block=5)
    shown = found.signals["norm_over_largest"]
    norms = found.signals["grad_norm"]
    largest = np.maximum.accumulate(norms, axis=1)[:, :-1]
    np.testing.assert_array_equal(shown[:, 1:], norms[:, 1:] / largest)


def test_the_largest_answer_is_done() -> None:
    assert GO < SKIP < FREEZE < ROLL_BACK


def test_rows_wait_where_batches_are_of_other_sizes() -> None:
    sizes = curriculum(10, (4, None, 1, 1), (8, 4, 6, False))
    row_steps = RowSteps(3, 3, State(3), sizes, torch.device("cpu"))
    row_steps.on_device.fill_(5)
    row_steps.read()
    row_steps._steps.used[1] = 2
    row_steps.read()
    pack_step = row_steps.pack_step()
    assert pack_step is not None and pack_step.groups == {2: [1]} and pack_step.trains.tolist() == [0, 1, 0]
    row_steps.done(pack_step)
    assert row_steps.steps == [5, 3, 5] == row_steps.on_device.tolist()
