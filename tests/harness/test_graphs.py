"""A pack whose steps and validation are replayed leaves what it leaves otherwise, bit for bit, whatever happens in
between.

On a CPU, with recordings that are done again one operation after the other; with CUDA graphs in tests/gpu/.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from harness.basics import devices
from harness.config import Trial
from harness.loop.graphs import USUAL_BEFORE, WIDEST, Graphs, may_replay
from harness.objectives.next_token import NextToken
from harness.objectives.table import OBJECTIVES
from harness.storage.results_folder import ResultsPath
from harness.testing import engine
from harness.testing.changes import Change, fill_first
from harness.training import pack
from harness.training.pack import Pack
from harness.training.sites import Site
from injectors.value import Value
from tests.harness import ladders
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
    """Its ways, with as few held-out windows in a piece of validation as there are sequences in a batch."""
    monkeypatch.setattr(devices, "CPUS", ())
    monkeypatch.setattr(pack, "windows_at_once", lambda *sizes: 1)


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
    assert recorded.steps == steps


@pytest.mark.parametrize("feature", EXACT[1::3])  # as many others fork and go on in tests/harness/test_accelerator.py
def test_whatever_is_on(feature: str, graphs: list[Graphs]) -> None:
    """Two trials are struck in between, and one becomes its twin again; rows come, and go when a block ends. Pieces of
    validation are replayed before and after.
    """
    fields = {"warmup": 1, **FEATURES[feature], "steps": STEPS, "validate_every": 8, "validate_tokens": 64}
    golden = engine.different(3, **fields)
    has_experts = fields.get("block", {}).get("channel_mixer") == "moe"
    up = {"tensor": "blocks.0.moe.up.0"} if has_experts else {}
    faults = [replace(FAULTS[0], **up), *FAULTS[1:]]
    trials = [*golden, *(replace(trial, fault=fault) for trial, fault in zip(golden, faults, strict=True))]
    same(trials, block=4, forks=True)
    curriculum = golden[0].curriculum
    waits = golden[0].section("signals").qk_rank
    if not OBJECTIVES[golden[0].objective.name].may_replay:  # what a policy samples by is sent at every step
        assert not graphs[-1].steps and not graphs[-1].pieces
        return
    assert graphs[-1].steps or waits or curriculum.steps - curriculum.grown < USUAL_BEFORE + 2
    pieces = -(-8 // golden[0].train.sequences)
    assert graphs[-1].pieces or pieces <= USUAL_BEFORE


def test_how_many_steps_are_replayed(graphs: list[Graphs]) -> None:
    """All but the first, those before anything is recorded, and the first ones at which as much is read."""
    same(engine.different(3, steps=40, attention="fused", signals={}), block=40)
    usual = 1 + USUAL_BEFORE
    reading = 2 * USUAL_BEFORE  # steps 10 and 20; what is read at step 30 is what was read at step 10
    times(graphs[-1], 40 - usual - reading)


def test_how_many_pieces_of_validation_are_replayed(graphs: list[Graphs], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each part of the rows all but those before anything is recorded, and the last one, which is shorter."""
    fields = {"steps": 40, "validate_every": 10, "validate_between": 64, "validate_tokens": 120}
    pieces = 4 * 4 + 7 - USUAL_BEFORE
    same(engine.different(3, **fields), block=40)
    assert graphs[-1].pieces == pieces
    monkeypatch.setattr(pack, "rows_at_once", lambda *sizes: 2)
    same(engine.different(4, **fields), block=40)
    assert graphs[-1].pieces == 2 * pieces


def test_shorter_pieces_have_a_recording_of_their_own(graphs: list[Graphs]) -> None:
    fields = {"steps": 12, "validate_every": 1, "validate_between": 24, "validate_tokens": 24}
    same(engine.different(3, **fields), block=12)
    assert graphs[-1].pieces == 2 * (1 + 12 - USUAL_BEFORE), "pieces of two windows and of one"


def test_pieces_are_recorded_anew_after_rows_have_come_and_gone(graphs: list[Graphs]) -> None:
    """A row comes at step 9, and goes after step 16."""
    golden = engine.different(2, steps=24, validate_every=4)
    found = same([*golden, replace(golden[0], fault=FAULTS[1])], block=8, forks=True)
    assert found.result.masked_step[2] is not None and len(found.pack) == 2
    assert graphs[-1].pieces == sum(4 * validations - USUAL_BEFORE for validations in (3, 2, 2))


def test_what_a_step_has_found_outlives_a_validation(graphs: list[Graphs]) -> None:
    """A trial is masked by the losses of steps after which pieces are replayed, in the same memory."""
    golden = engine.different(2, steps=STEPS, validate_every=1, signals={})
    found = same([*golden, replace(golden[0], fault=FAULTS[1])], block=STEPS, forks=True)
    assert found.result.masked_step[2] is not None and graphs[-1].pieces and graphs[-1].steps


def test_where_ranks_are_processes_nothing_is_replayed(graphs: list[Graphs]) -> None:
    def spread(pack: Pack) -> None:
        pack.ranks.processes = 2  # which is all that is asked

    same(engine.different(2, steps=12), prepare=spread)
    assert not graphs[-1].steps and not graphs[-1].pieces


def test_a_struck_step_is_taken_by_the_host(graphs: list[Graphs]) -> None:
    golden = engine.trial(steps=20, attention="explicit", validate_every=20)
    disarmed = Change(Site.WEIGHT, range(0), fill_first("embedding", 1.0))
    struck = Change(Site.REDUCED_GRADIENT, range(11, 14), lambda tensors: [x.mul_(2.0) for x in tensors.values()])
    same([golden, golden], {1: disarmed}, block=20)
    usual = graphs[-1].steps
    assert usual > 10
    same([golden, golden], {1: struck}, block=20)
    times(graphs[-1], usual - 3)


def test_a_row_full_of_nan_and_its_neighbours(graphs: list[Graphs]) -> None:
    golden = engine.different(3, steps=STEPS)
    ruin = Change(Site.WEIGHT, range(8, 9), fill_first("blocks.0.feedforward.up", torch.nan))
    found = same([*golden, golden[0]], {3: ruin}, block=STEPS)
    assert found.result.nonfinite_step == [None, None, None, 8] and graphs[-1].steps
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
    assert len(read) == 24 and read[:12] == read[12:] and not graphs[-1].steps
    assert graphs[-1].pieces, "in validation nobody reads"


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
    assert any(found.result.incidents) and graphs[-1].steps and graphs[-1].pieces


def test_a_pack_goes_on_from_a_checkpoint(tmp_path: Path, graphs: list[Graphs]) -> None:
    class Once(engine.Checkpoints):
        def is_due(self, step: int) -> bool:
            return step == 11

    golden = engine.different(3, steps=24, validate_every=2)
    trials = [*golden, replace(golden[1], fault=FAULTS[0])]
    checkpoints = Once(ResultsPath.at(tmp_path))
    whole = engine.run(trials, block=4, forks=True, checkpoints=checkpoints, record=Emulated)
    assert graphs[-1].steps > 8 and graphs[-1].pieces > 8
    engine.assert_same_end(engine.resumed(trials, tmp_path, [], 4, forks=True), whole, 8)


@pytest.mark.parametrize(("refused", "name"), [(0, "piece of validation"), (1, "step")])
def test_what_cannot_be_recorded_is_done_as_ever(refused: int, name: str, graphs: list[Graphs]) -> None:
    made = count()

    class Refusing(Emulated):
        def record(self, function: Callable[[], T]) -> T:
            if next(made) == refused:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            return super().record(function)

    trials = engine.different(3, steps=12)
    eager = engine.run(trials, block=4)
    says = f"a {name} could not be recorded, and none is replayed: operation not permitted"
    with pytest.warns(UserWarning, match=says) as warned:
        found = engine.run(trials, block=4, record=Refusing)
    engine.assert_same_trials(eager, found)
    assert len(warned) == 1 and bool(graphs[-1].pieces) == (name == "step") != bool(graphs[-1].steps)


def test_wide_models_and_unknown_objectives_are_not_replayed(
    graphs: list[Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = engine.different(2, steps=8)
    assert may_replay(trials[0]) and not may_replay(engine.trial(width=WIDEST + 8))
    monkeypatch.setattr(NextToken, "may_replay", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.run(trials, record=Emulated)
    assert not graphs[-1].steps and not graphs[-1].pieces
