"""A pack whose steps are replayed leaves what it leaves otherwise, bit for bit, whatever happens in between.

On a CPU, with recordings that are done again one operation after the other; with CUDA graphs in tests/gpu/.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from harness.basics import devices
from harness.config import Trial
from harness.objectives.next_token import NextToken
from harness.storage.results_folder import ResultsPath
from harness.training.graphs import USUAL_BEFORE, WIDEST, Graphs, may_replay
from harness.training.pack import Pack
from harness.training.sites import Site
from injectors.value import Value
from tests.harness import engine, ladders
from tests.harness.changes import Change, fill_first
from tests.harness.features import FEATURES
from tests.harness.recording import Emulated
from tests.harness.test_accelerator import EXACT

T = TypeVar("T")
STEPS, STRUCK = 16, 9
FAULTS = [
    Value(start=STRUCK, tensor="blocks.0.feedforward.up", element=0, bit=23),
    Value(start=STRUCK, tensor="embedding", model="round"),  # to fp32: it does nothing, and the trial is its twin again
    Value(start=12, site="activation", tensor="blocks.0.residual", element=1, bit=20),
]
pytestmark = pytest.mark.usefixtures("accelerator")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPUS", ())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graphs]:
    """All that were made, the newest last."""
    made: list[Graphs] = []
    plain = Graphs.__init__

    def noted(self: Graphs, *arguments: Any) -> None:
        plain(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Graphs, "__init__", noted)
    return made


def same(trials: Sequence[Trial], *arguments: Any, **options: Any) -> engine.Run:
    """The same from both ways, and the second."""
    eager = engine.run(trials, *arguments, **options)
    replayed = engine.run(trials, *arguments, **options, record=Emulated)
    engine.assert_same_trials(eager, replayed)
    assert eager.result == replayed.result
    return replayed


def times(recorded: Graphs, steps: int) -> None:
    assert recorded.replayed == steps


@pytest.mark.parametrize("feature", EXACT)
def test_whatever_is_on(feature: str, graphs: list[Graphs]) -> None:
    """Two trials are struck in between, and one becomes its twin again; rows come, and go when a block ends."""
    golden = engine.different(3, **{"warmup": 1, **FEATURES[feature], "steps": STEPS, "validate_every": STEPS})
    trials = [*golden, *(replace(trial, fault=fault) for trial, fault in zip(golden, FAULTS, strict=True))]
    same(trials, block=4, forks=True)
    curriculum = golden[0].curriculum
    waits = golden[0].section("signals").qk_rank
    assert graphs[-1].replayed or waits or curriculum.steps - curriculum.grown < USUAL_BEFORE + 2


def test_how_many_steps_are_replayed(graphs: list[Graphs]) -> None:
    """All but the first, those before anything is recorded, and those at which logits are read."""
    same(engine.different(3, steps=40, attention="fused", signals={}), block=40)
    usual = 1 + USUAL_BEFORE
    logits = 3  # steps 10, 20 and 30
    times(graphs[-1], 40 - usual - logits)


def test_a_struck_step_is_taken_by_the_host(graphs: list[Graphs]) -> None:
    golden = engine.trial(steps=20, attention="explicit", validate_every=20)
    disarmed = Change(Site.WEIGHT, range(0), fill_first("embedding", 1.0))
    struck = Change(Site.REDUCED_GRADIENT, range(11, 14), lambda tensors: [x.mul_(2.0) for x in tensors.values()])
    same([golden, golden], {1: disarmed}, block=20)
    usual = graphs[-1].replayed
    assert usual > 10
    same([golden, golden], {1: struck}, block=20)
    times(graphs[-1], usual - 3)


def test_a_row_full_of_nan_and_its_neighbours(graphs: list[Graphs]) -> None:
    golden = engine.different(3, steps=STEPS)
    ruin = Change(Site.WEIGHT, range(8, 9), fill_first("blocks.0.feedforward.up", torch.nan))
    found = same([*golden, golden[0]], {3: ruin}, block=STEPS)
    assert found.result.nonfinite_step == [None, None, None, 8] and graphs[-1].replayed
    engine.assert_same_trials(engine.run(golden), found, {number: number for number in range(3)})


def test_while_somebody_reads_a_tap_nothing_is_replayed(graphs: list[Graphs]) -> None:
    """And what is read is of every step."""
    read: list[float] = []

    def attach(pack: Pack) -> None:
        def reader(name: str, x: Tensor) -> None:
            if torch.is_grad_enabled():
                read.append(float(x.detach().sum()))

        pack.model.taps.attach("logits", reader)

    same(engine.different(2, steps=12), prepare=attach)
    assert len(read) == 24 and read[:12] == read[12:] and not graphs[-1].replayed


def test_a_tap_that_is_left_lets_steps_be_replayed() -> None:
    taps = engine.pack_of(engine.different(2)).model.taps
    before = taps.on_host
    detach = taps.attach("logits", lambda name, x: None)
    assert taps.on_host == before + 1
    detach()
    assert taps.on_host == before


@pytest.mark.parametrize("action", ["roll_back", "repair", "skip", "lower_rate", "shrink_embedding", "reset_moments"])
def test_playbooks(action: str, graphs: list[Graphs]) -> None:
    """A row that goes back stands apart from the others for a while, and is then replayed with them."""
    rung = {"repair": "re_execute"}.get(action, action)
    golden = ladders.trained(ladders.rung(rung), steps=32)
    found = same([golden, ladders.struck(golden, ladders.nan(start=12)), replace(golden, seed=9)], block=4)
    assert any(found.result.incidents) and graphs[-1].replayed


def test_a_pack_goes_on_from_a_checkpoint(tmp_path: Path, graphs: list[Graphs]) -> None:
    class Once(engine.Checkpoints):
        def is_due(self, step: int) -> bool:
            return step == 11

    golden = engine.different(3, steps=24)
    trials = [*golden, replace(golden[1], fault=FAULTS[0])]
    checkpoints = Once(ResultsPath.at(tmp_path))
    whole = engine.run(trials, block=4, forks=True, checkpoints=checkpoints, record=Emulated)
    assert graphs[-1].replayed > 8
    engine.assert_same_end(engine.resumed(trials, tmp_path, [], 4, forks=True), whole, 8)


def test_a_step_that_cannot_be_recorded_is_taken_as_ever() -> None:
    class Refusing(Emulated):
        def record(self, function: Callable[[], T]) -> T:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    trials = engine.different(3, steps=12)
    eager = engine.run(trials, block=4)
    with pytest.warns(UserWarning, match="could not be recorded, and none is replayed: operation not permitted"):
        found = engine.run(trials, block=4, record=Refusing)
    engine.assert_same_trials(eager, found)


def test_wide_models_and_unknown_objectives_are_not_replayed(
    graphs: list[Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = engine.different(2, steps=8)
    assert may_replay(trials[0]) and not may_replay(engine.trial(width=WIDEST + 8))
    monkeypatch.setattr(NextToken, "may_replay", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(trials, record=Emulated)
    assert not graphs[-1].replayed
