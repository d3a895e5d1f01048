"""Every answer to an alarm, and every playbook: what it does to the trial, and that it does nothing to any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config import Data, Trial
from harness.config.ladder import canonical
from harness.detectors.table import DETECTORS
from harness.guards.detection import Detection
from harness.guards.finite import Finite
from harness.guards.playbook import Playbook
from harness.recovery.table import ACTIONS
from harness.training import batches_ahead, signals, snapshots
from harness.training.batches_ahead import odd_batches
from harness.training.clock import Clock
from harness.training.loop import train
from harness.training.signals import Recorder
from harness.training.sites import Agenda, Event, Site, Visit
from injectors.batch import BatchFault, DuplicatedBatch, RandomTokens, RareTokens, Repetition
from injectors.value import Value
from tests.harness.engine import (
    Run,
    assert_fork_equals_full_run,
    assert_resumes,
    assert_same_trials,
    injector_of,
    left,
    pack_of,
    run,
    same_bits,
    trial,
)

STEPS, START = 24, 9
OWN: dict[str, Any] = {"steps": STEPS, "lr": 1e-2, "depth": 1}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "change_recipe": {"set": "{optim.beta2: 0.9, optim.weight_decay: 0.1}"},
    "skip_batches": {"count": 2},
}
SNAPSHOT = {"every": 2, "kept": 4}


def trained(
    *rungs: Mapping[str, Any], detect: str = "finite", snapshot: Mapping[str, Any] = SNAPSHOT, **fields: Any
) -> Trial:
    """A small trial with a ladder."""
    actions = {action for rung in rungs for action in rung["action"].split("+")}
    options = {f"playbook.{name}": OPTIONS[name] for name in actions if name in OPTIONS}
    if any(ACTIONS[name].goes_back for name in actions):
        options["playbook.snapshot"] = snapshot
    book = {"name": "test", "ladder": canonical(list(rungs))}
    return trial(**{"seed": 1, **OWN, "detect": {"name": detect}, "playbook": book} | options | fields)


def rung(action: str, detector: str = "any", limit: int | None = 3, cool_down: int = 4) -> dict[str, Any]:
    return {"detector": detector, "action": action, "limit": limit, "cool_down": cool_down}


def nan(start: int = START, duration: int | None = 1, **fields: Any) -> Value:
    """What makes the gradient of one step NaN, and leaves nothing else behind."""
    options = {"site": "reduced_gradient", "tensor": "head", "element": 3, "model": "set", "value": float("nan")}
    return Value(start=start, duration=duration, **options | fields)


def struck(golden: Trial, fault: Any = None) -> Trial:
    return replace(golden, fault=nan() if fault is None else fault)


LADDERS = {name: [rung("undo", "oracle")] if name == "undo" else [rung(name)] for name in ACTIONS if name != "carry_on"}
LADDERS |= {
    "lower_rate": [rung("lower_rate+skip")],
    "change_recipe": [rung("change_recipe+skip")],
    "shrink_embedding": [rung("shrink_embedding+skip")],
    "roll_back+skip_batches": [rung("roll_back+skip_batches")],
    "roll_back+swap_data+lower_rate": [rung("roll_back+swap_data+lower_rate")],
    "roll_back+change_recipe": [rung("roll_back+change_recipe")],
    "roll_back+reset_moments": [rung("roll_back+reset_moments")],
}


@pytest.mark.parametrize("name", LADDERS)
def test_a_trial_is_finite_after_it_and_no_other_trial_knows(name: str) -> None:
    golden = trained(*LADDERS[name])
    trials = [golden, struck(golden), replace(golden, seed=2), struck(replace(golden, seed=2), nan(START + 2))]
    found = assert_fork_equals_full_run(trials)
    assert "non-finite" not in found.result.outcome and found.result.nonfinite_step == [None] * 4
    assert found.result.strikes[1] == 1 and np.isfinite(found.signals["loss"]).all()
    assert torch.isfinite(found.pack.weights).all()
    (incident,) = found.result.incidents[1]
    assert incident["step"] == START and incident["alarms"] == 1 and incident["steps_lost"] >= 1
    assert [act["action"] for act in incident["acts"]][0] == LADDERS[name][0]["action"].split("+")[0]
    assert found.result.incidents[0] == found.result.incidents[2] == []
    assert_same_trials(run(trials[:1] + trials[2:3]), found, {0: 0, 1: 2})


@pytest.mark.parametrize("name", LADDERS)
def test_a_killed_pack_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    golden = trained(*LADDERS[name])
    assert_resumes([golden, struck(golden)], tmp_path, [START + 1, START + 3, STEPS - 1], block=5, forks=True)


def test_a_checkpoint_knows_at_whose_last_step_was_an_alarm(tmp_path: Path) -> None:
    """Of such a row no snapshot is taken, also where the pack was killed in between."""
    ladder = [rung("skip", limit=1), rung("roll_back+skip_batches")]
    golden = trained(*ladder, snapshot={"every": 1, "kept": 4})
    assert_resumes([golden, struck(golden, nan(duration=2))], tmp_path, [START + 1], block=5, forks=True)


GROWING = {"batch": 4, "batch_start": 1, "batch_steps": 12}


@pytest.mark.parametrize("fields", [{"sigma_reparam": True}, {"sigma_reparam": True, **GROWING}, GROWING])
def test_a_row_that_goes_back_changes_no_other(fields: Mapping[str, Any]) -> None:
    """Also not those that wait for it, because their batches are larger now."""
    golden = trained(rung("roll_back"), **fields)
    others = [replace(golden, seed=2), replace(golden, seed=3)]
    found, alone = run([*others, struck(golden)]), run([*others, golden])
    assert found.result.incidents[2] and not alone.result.incidents[2]
    assert_same_trials(alone, found, {0: 0, 1: 1, 2: 2})


@pytest.mark.parametrize("first", ["lower_rate", "carry_on", "shrink_embedding", "change_recipe"])
def test_a_rung_that_takes_the_step_is_passed_over_where_it_cannot_be_taken(first: str) -> None:
    golden = trained(rung(first, limit=1), rung("roll_back"))
    found = run([golden, struck(golden)], forks=True)
    assert [act["action"] for act in found.result.incidents[1][0]["acts"]] == ["roll_back"]
    assert same_bits(left(found, 0), left(found, 1)) == []


class Overflowing:
    """NaN in the weights at one step, and when that step is run again a gradient that overflows."""

    permanent, taps, memory = True, (), {}
    calls = ((Site.WEIGHT, START), (Site.REDUCED_GRADIENT, START))

    def __init__(self) -> None:
        self.visits = 0

    def recall(self, memory: Mapping[str, Any]) -> None: ...

    def visit(self, visit: Any) -> list[Any]:
        self.visits += 1
        if self.visits in (1, 4):  # the weights at first, the gradient the second time
            visit.tensors["head"].fill_(float("nan") if visit.site == Site.WEIGHT else float("inf"))
            return [Event(visit.site, "head", None, None, visit.step, "a", "b", None, None, True)]
        return []


def test_a_step_that_is_waited_for_is_asked_about_also_where_it_overflows() -> None:
    options = {"precision": "fp16", "loss_scaling": "dynamic", "loss_scale": 1024.0}
    golden = trained(rung("re_execute"), **options)
    found = run([golden, golden], {1: Overflowing()})
    (incident,) = found.result.incidents[1]
    assert verdicts(found, 1) == ["transient"] and incident["closed"] == START + 5
    assert found.result.outcome[1] != "non-finite"


def test_moments_that_are_off_begin_anew_by_themselves() -> None:
    """What is off is told from a snapshot, though nothing of the ladder goes back."""
    golden = trained(
        rung("reset_moments", limit=1),
        detect="combined",
        **{"playbook.reset_moments": {"which": "off"}, "playbook.snapshot": SNAPSHOT},
    )
    found = run([golden, struck(golden, nan(site="moment_2", element=None, tensor="head", model="scale", value=1e6))])
    acts = found.result.incidents[1][0]["acts"]
    assert acts[0]["detail"]["tensors"] == ["head"]


def test_snapshots_of_a_row_that_is_frozen_hold_no_block_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded from the first step on to which a row may go back is kept; a frozen one goes nowhere."""
    golden = trained(rung("roll_back"), steps=48)
    held: list[int] = []
    flush = Recorder.flush

    def noted(recorder: Recorder) -> None:
        flush(recorder)
        held.append(len(recorder._blocks))

    monkeypatch.setattr(Recorder, "flush", noted)
    others = [replace(golden, seed=seed) for seed in range(2, 9)]  # so many that its row does not go
    found = run([golden, struck(golden, nan(duration=None)), *others], block=4)
    assert found.result.outcome[1] == "non-finite" and max(held[8:]) <= 4, held


@pytest.mark.parametrize("fields", [{}, {"ranks": 2}, {"precision": "bf16"}, {"name": "sgd"}, {"dropout": 0.2}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_skipped_step_leaves_weights_and_moments_as_they_are(fields: Mapping[str, Any], value: float) -> None:
    limit = {"detect.grad_norm_skip": {"limit": 1e3}}
    golden = trained(rung("skip", "finite+grad_norm_skip"), detect="finite+grad_norm_skip", **limit, **fields)
    state: dict[int, dict[str, torch.Tensor]] = {}

    def keep(pack: Any) -> None:
        take = pack.step

        def step(rate, stepping, measure):
            before = state_of(pack, 1)
            result = take(rate, stepping, measure)
            state[pack.clock.steps[1]] = {"taken": stepping[1].clone(), **changed(before, state_of(pack, 1))}
            return result

        pack.step = step

    run([golden, struck(golden, nan(value=value))], prepare=keep)
    taken = {step: bool(kept.pop("taken")) for step, kept in state.items()}
    assert [step for step, was in taken.items() if not was] == [START]
    assert not any(kept.any() for kept in state[START].values()) and state[START + 1]["weights"].any()


def state_of(pack: Any, row: int) -> dict[str, torch.Tensor]:
    arrays = {"weights": pack.weights, **{name: pack.optimizer.slot(name) for name in pack.optimizer.slots}}
    return {name: x[row].clone() for name, x in arrays.items()} | {"updates": pack.optimizer.updates[row].clone()}


def changed(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: before[name] != x for name, x in now.items()}


@pytest.mark.parametrize("action", ["roll_back", "re_execute", "undo"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("site", ["reduced_gradient", "gradient", "weight", "moment_2", "activation"])
@pytest.mark.parametrize("may_look", [("cpu",), ()])
def test_with_the_same_data_a_transient_fault_leaves_nothing(
    action: str, ranks: int, site: str, may_look: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole trial is its golden twin, bit for bit, its detectors' memory included; also where the host looks once
    a block, as on a GPU."""
    monkeypatch.setattr(snapshots, "MAY_LOOK", may_look)
    where = {"tensor": "blocks.0.residual"} if site == "activation" else {}
    detector = "oracle" if action == "undo" else "any"
    golden = trained(rung(action, detector), detect="finite+skip_step", ranks=ranks)
    found = run([golden, struck(golden, nan(site=site, **where))], forks=True, block=5)
    assert same_bits(left(found, 0), left(found, 1)) == [] and found.result.digest[0] == found.result.digest[1]
    assert found.result.strikes == [0, 1] and found.pack.rows_state.equal(0, 1)
    (incident,) = found.result.incidents[1]
    assert incident["acts"][0]["to"] <= START


def verdicts(found: Run, number: int) -> list[str]:
    acts = [act for incident in found.result.incidents[number] for act in incident["acts"]]
    return [act["detail"]["verdict"] for act in acts if "verdict" in act["detail"]]


@pytest.mark.parametrize("detector", ["moment_bound", "combined", "update_norm"])
def test_what_is_known_after_a_step_is_looked_for_in_the_step_before(detector: str) -> None:
    options = {"detect.update_norm": {"window": 6}} if detector == "update_norm" else {}
    read = {"signals": {"moment_size": 1}} if detector == "moment_bound" else {}
    golden = trained(rung("re_execute"), detect=detector, snapshot={"every": 1, "kept": 4}, **options, **read)
    fault = {"site": "moment_1" if detector == "update_norm" else "moment_2", "model": "scale", "value": 1e12}
    found = run([golden, struck(golden, nan(tensor="head", element=None, **fault))], forks=True)
    assert verdicts(found, 1) == ["transient"] and found.result.incidents[1][0]["steps_lost"] == 2
    assert same_bits(left(found, 0), left(found, 1)) == []


def test_a_permanent_fault_is_left_behind_with_its_device() -> None:
    golden = trained(rung("re_execute", limit=1))  # which is used once, however often it goes back
    found = run([golden, struck(golden, nan(duration=None))], forks=True)
    assert verdicts(found, 1) == ["persistent"]
    assert same_bits(left(found, 0), left(found, 1)) == []
    again = run([struck(trained(rung("roll_back")), nan(duration=None)), golden])
    assert again.result.outcome[0] == "non-finite" and again.result.strikes[0] == 4


class Poison:
    """NaN wherever one batch is read, as a bad document is."""

    permanent, taps, memory = False, (), {}

    def __init__(self, start: int):
        self.start, self.calls = start, [(Site.BATCH, start)]

    def recall(self, memory: Mapping[str, Any]) -> None: ...

    def visit(self, visit: Any) -> list[Any]:
        visit.tensors["batch"].fill_(63)
        return [Event("batch", "batch", None, None, visit.step, "a", "b", None, None, True)]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("looks", [True, False])
def test_a_batch_that_is_bad_is_bad_again_and_is_left_out(
    every: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a text of one rare token is 5, and none of the others' is beyond 4.8 after step 13.

    Where its tokens show that it is bad, another is tried at once; where not, what else may be wrong is tried first.
    """
    if not looks:
        monkeypatch.setattr(batches_ahead, "RARER", np.inf)
        monkeypatch.setattr(batches_ahead, "MORE_REPEATED", np.inf)
    memory, ratio = {"every": every, "kept": 4}, {"detect.loss_ratio": {"ratio": 1.1}}
    golden = trained(rung("re_execute"), detect="loss_ratio", batch=16, snapshot=memory, **ratio)
    found = run([golden, golden], {1: Poison(START + 6)})
    assert found.result.incidents[0] == [] and verdicts(found, 1) == ["data"], found.result.incidents
    acts = [act["detail"].get("tried") for act in found.result.incidents[1][0]["acts"]]
    assert acts == ([None, None] if looks else [None, "spare", "other data", None])
    assert found.result.strikes[1] == (1 if looks else 3)  # at first, again, and on another device
    assert not np.array_equal(found.signals["loss"][0], found.signals["loss"][1])


@pytest.mark.parametrize("duration", [1, 5])
def test_batches_that_are_odd_are_left_out_at_once(duration: int) -> None:
    memory, text, start = {"every": 1, "kept": 4}, Data(source="stdlib"), 60
    fields = {"batch": 8, "context": 32, "steps": 70, "data": text}
    golden = trained(rung("re_execute"), detect="combined", snapshot=memory, **fields)
    found = run([golden, struck(golden, RareTokens(start=start, duration=duration))])
    first, last = found.result.incidents[1][0]["acts"]
    assert first["step"] == last["step"] == start and verdicts(found, 1)[0] == "data"
    assert first["detail"] == {"odd": duration, "batches": duration} and last["detail"]["batches"] == duration
    assert found.result.incidents[1][0]["steps_lost"] == 1 == found.result.strikes[1]


@pytest.mark.parametrize("fault", [RandomTokens, RareTokens, Repetition])
@pytest.mark.parametrize(("duration", "odd"), [(1, [0, 1, 0]), (5, [0, 5, 1]), (9, [0, 0, 5])])
def test_a_batch_is_odd_by_its_tokens_alone(fault: type[BatchFault], duration: int, odd: list[int]) -> None:
    """Looked at from the step before, at the first, and at the fifth; at most eight. A look is none of its strikes."""
    golden = trial(seed=1, batch=8, context=32, **(OWN | {"steps": 60}), data=Data(source="stdlib"))
    faulty = struck(golden, fault(start=40, duration=duration))
    pack, agenda = pack_of([golden, faulty]), Agenda([None, injector_of(faulty)])
    assert [odd_batches(pack, agenda, 1, step, 8) for step in (39, 40, 44)] == odd
    assert [odd_batches(pack, agenda, 0, step, 8) for step in range(60)] == [0] * 60
    assert agenda.strikes == [0, 0] and odd_batches(pack, agenda, 1, 3, 8) == 0


def test_a_look_at_batches_leaves_a_fault_its_memory() -> None:
    golden = trial(seed=1, **OWN)
    faulty = struck(golden, DuplicatedBatch(start=START, duration=1))
    injector = injector_of(faulty)
    pack, agenda = pack_of([golden, faulty]), Agenda([None, injector])
    found = []
    for step in range(START + 1):
        batch = pack.batch(step)
        for number in agenda.due(Site.BATCH, step):
            agenda.visit(number, Visit(Site.BATCH, step, {"batch": batch[1]}))
        odd_batches(pack, agenda, 1, step, 8)
        found.append(batch[1].clone())
    assert agenda.changes == [0, 1] and torch.equal(found[-1], found[START - faulty.fault.late])


@pytest.mark.parametrize("every", [1, 3])
def test_a_state_that_has_grown_beyond_measure_is_not_gone_back_to(every: int) -> None:
    """Weights that an update has left far too large are finite, and were kept."""
    golden = trained(rung("re_execute"), snapshot={"every": every, "kept": 4})
    found = run([golden, struck(golden, nan(site="update", value=3e38))], forks=True)
    (incident,) = found.result.incidents[1]
    assert verdicts(found, 1) == ["transient"] and same_bits(left(found, 0), left(found, 1)) == []
    assert incident["step"] == START + 1 and incident["acts"][0]["to"] == START == START + 2 - incident["steps_lost"]


def test_a_state_that_is_awaited_is_kept() -> None:
    """Snapshots are rare: the step that is run again is kept, so that the next try begins there; and what is quiet."""
    golden = trained(rung("re_execute"), snapshot={"every": 5, "kept": 3})
    found = run([golden, struck(golden, nan(START + 3, duration=None))], forks=True)
    acts = found.result.incidents[1][0]["acts"]
    assert [act["to"] for act in acts] == [10, START + 3, 10] and verdicts(found, 1) == ["persistent"]
    assert found.result.incidents[1][0]["steps_lost"] == 3 + 1 + 3
    assert same_bits(left(found, 0), left(found, 1)) == []


class Gradient:
    """It is wrong at some steps, and NaN from one of them on."""

    taps, memory = (), {}

    def __init__(self, permanent: bool, steps: Iterable[int], nan_from: int = 0):
        self.permanent, self.nan_from = permanent, nan_from
        self.calls = [(Site.REDUCED_GRADIENT, step) for step in steps]

    def recall(self, memory: Mapping[str, Any]) -> None: ...

    def visit(self, visit: Any) -> list[Any]:
        visit.tensors["head"].mul_(-3.0 if visit.step < self.nan_from else float("nan"))
        return [Event(visit.site, "head", None, None, visit.step, "a", "b", None, None, True)]


def test_nothing_is_left_of_what_a_bad_device_has_trained_since_the_snapshot() -> None:
    golden = trained(rung("re_execute", limit=5), snapshot={"every": 5, "kept": 4})
    found = run([golden, golden], {0: None, 1: Gradient(True, range(11, STEPS), nan_from=13)})
    assert verdicts(found, 1) == ["persistent"] and same_bits(left(found, 0), left(found, 1)) == []


def breaking(is_broken: Callable[[Any, int], bool]) -> Callable[[Any], None]:
    """For `run(prepare=...)`: gradients of the rows that are broken are NaN, whatever is tried."""

    def prepare(pack: Any) -> None:
        unscale = pack.unscale

        def noted() -> None:
            unscale()
            for row in range(len(pack)):
                if is_broken(pack, row):
                    pack.gradients[row].fill_(float("nan"))

        pack.unscale = noted

    return prepare


def test_steps_before_others_batches_were_read_are_not_run_again_with_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would read what was left out, and differ."""
    monkeypatch.setattr(batches_ahead, "RARER", np.inf)
    monkeypatch.setattr(batches_ahead, "MORE_REPEATED", np.inf)
    memory, ratio = {"every": 1, "kept": 8}, {"detect.loss_ratio": {"ratio": 1.1}}
    golden = trained(rung("re_execute"), detect="finite+loss_ratio", batch=16, snapshot=memory, **ratio)
    late = breaking(lambda pack, row: pack.rows[row] == 1 and pack.clock.steps[row] >= 17)
    found = run([golden, golden], {0: None, 1: Poison(15)}, prepare=late)
    assert verdicts(found, 1) == ["data", "correct"]
    assert min(act["to"] for act in found.result.incidents[1][-1]["acts"] if act["to"] is not None) == 15


class Sleeper:
    """A weight is wrong from step 9 on, and its gradient NaN from 13 on."""

    permanent, taps, memory, calls = False, (), {}, [(Site.WEIGHT, 9)]

    def recall(self, memory: Mapping[str, Any]) -> None: ...

    def visit(self, visit: Any) -> list[Any]:
        visit.tensors["head"].view(-1)[0] = 7.0
        return [Event(visit.site, "head", None, None, visit.step, "a", "b", None, None, True)]


def test_a_step_that_is_awaited_costs_no_history() -> None:
    """The oldest snapshot is still there, to which the next rung wants to go back."""
    prepare = breaking(lambda pack, row: pack.weights[row].abs().max() > 5 and pack.clock.steps[row] >= 13)
    options = {"playbook.re_execute": {"deepest": 0, "batches": 0}, "playbook.roll_back": {"back": 5}}
    memory = {"every": 5, "kept": 2}
    golden = trained(rung("re_execute"), rung("roll_back"), snapshot=memory, **options)
    found = run([golden, golden], {0: None, 1: Sleeper()}, prepare=prepare)
    assert verdicts(found, 1) == ["correct"] and same_bits(left(found, 0), left(found, 1)) == []
    deeper = trained(rung("re_execute"), snapshot=memory)
    found = run([deeper, deeper], {0: None, 1: Sleeper()}, prepare=prepare)
    assert verdicts(found, 1) == ["transient"] and same_bits(left(found, 0), left(found, 1)) == []


@pytest.mark.parametrize("every", [1, 4])
def test_two_faults_in_a_block_are_both_undone(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks once a block: a row that waits for it is kept under no step but its own."""
    monkeypatch.setattr(snapshots, "MAY_LOOK", ())
    golden = trained(rung("re_execute", limit=5), snapshot={"every": every, "kept": 8}, steps=48)
    found = run([golden, golden], {0: None, 1: Gradient(False, (9, 13))}, block=16)
    assert verdicts(found, 1) == ["transient"] * 2
    assert same_bits(left(found, 0), left(found, 1)) == []


def test_without_a_snapshot_of_the_step_before_the_step_itself_is_run_again() -> None:
    options = {"detect.update_norm": {"window": 6}}
    golden = trained(rung("re_execute"), detect="finite+combined", snapshot={"every": 1, "kept": 1}, **options)
    found = run([golden, struck(golden, nan(site="update", value=3e38))])
    assert found.result.incidents[1][0]["acts"][0]["to"] == START + 1


def test_what_is_right_goes_to_the_next_rung() -> None:
    """A limit that every step is above is no fault: the same value on both devices, with every batch."""
    golden = trained(
        rung("re_execute", limit=1),
        rung("skip", limit=2),
        detect="grad_norm_skip",
        **{"detect.grad_norm_skip": {"limit": 1e-6}},
    )
    found = run([golden, replace(golden, seed=2)])
    acts = found.result.incidents[0][0]["acts"]
    tried = [act["detail"].get("tried") for act in acts if act["action"] == "re_execute"]
    assert tried == [None, "spare", *["other data"] * 4, None] and acts[6]["detail"]["verdict"] == "correct"
    assert [act["action"] for act in acts[7:]] == ["skip"] * 2


def test_rungs_are_climbed_in_turn_and_begin_anew_after_the_cool_down() -> None:
    ladder = [rung("skip", limit=2), rung("lower_rate+skip", limit=1), rung("skip_batches", limit=1)]
    golden = trained(*ladder)
    fault = nan(START, 4)
    later = nan(START + 10, 1)
    found = run([golden, struck(golden, fault), struck(golden, later)])
    (incident,) = found.result.incidents[1]
    assert [act["action"] for act in incident["acts"]] == ["skip", "skip", "lower_rate", "skip", "skip_batches"]
    assert incident["alarms"] == 4 == incident["steps_lost"] and incident["closed"] == START + 3 + 4 + 1
    assert [act["action"] for act in found.result.incidents[2][0]["acts"]] == ["skip"]
    rates = found.signals["learning_rate"]
    assert np.array_equal(rates[1, : START + 3], rates[0, : START + 3])
    np.testing.assert_allclose(rates[1, START + 3 :], rates[0, START + 3 :] / 2, rtol=1e-6)
    assert not np.array_equal(found.signals["loss"][1, START + 4 :], found.signals["loss"][0, START + 4 :])


def test_at_the_end_of_the_ladder_what_is_not_finite_freezes_and_the_rest_goes_on() -> None:
    golden = trained(rung("skip", limit=2))
    found = run([golden, struck(golden, nan(START, 3))])
    assert found.result.outcome == ["trained", "non-finite"] and found.result.nonfinite_step[1] == START + 2
    loud = trained(rung("skip", limit=2), detect="grad_norm_skip", **{"detect.grad_norm_skip": {"limit": 1e-6}})
    incidents = run([loud, loud]).result.incidents[0]
    assert [one["alarms"] for one in incidents] == [2] * 4 and [one["step"] for one in incidents] == [0, 6, 12, 18]


def test_no_state_that_is_not_sound_is_kept() -> None:
    """Moments that are NaN freeze nothing until they are weights: what is kept is from before."""
    golden = trained(rung("roll_back"), snapshot={"every": 1, "kept": 2})
    found = run([golden, struck(golden, nan(site="update", tensor="head"))], forks=True)
    assert same_bits(left(found, 0), left(found, 1)) == []
    assert [act["to"] for act in found.result.incidents[1][0]["acts"]] == [START]


def test_each_rollback_of_an_incident_goes_further_back() -> None:
    golden = trained(rung("roll_back", limit=3), snapshot={"every": 2, "kept": 4})
    found = run([golden, struck(golden, nan(duration=None))])
    steps = [act["to"] for act in found.result.incidents[1][0]["acts"] if act["action"] == "roll_back"]
    assert steps == [8, 6, 4]


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("may_look", [("cpu",), ()])
def test_snapshots_may_lie_in_main_memory(where: str, may_look: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same where the host looks which rows are sound, and where it does not."""
    monkeypatch.setattr(snapshots, "MAY_LOOK", may_look)
    golden = trained(rung("roll_back"), snapshot={**SNAPSHOT, "on": where})
    found = run([golden, struck(golden)])
    assert same_bits(left(found, 0), left(found, 1)) == []
    assert found.result.incidents[1][0]["acts"][0]["to"] == START - 1


BEYOND = {"detect.grad_norm_skip": {"limit": 1e9}}


@pytest.mark.parametrize("first", ["carry_on", "skip"])
def test_of_two_detectors_that_raise_an_alarm_the_first_rung_says_whether_the_step_is_taken(first: str) -> None:
    """Also where the one of them would be answered otherwise: the device holds what the host does."""
    other = "skip" if first == "carry_on" else "carry_on"
    ladder = [rung(first, "skip_step", limit=1), rung(other, "grad_norm_skip", limit=None)]
    window = {"detect.skip_step": {"window": 8}}
    golden = trained(*ladder, detect="grad_norm_skip+skip_step", **BEYOND, **window)
    found = run([golden, struck(golden, nan(value=1e10))])
    act, incident = found.result.incidents[1][0]["acts"][0], found.result.incidents[1][0]
    assert act["step"] == START and act["action"] == first and set(act["detectors"]) == {"grad_norm_skip", "skip_step"}
    assert (incident["steps_lost"] == 0) == (first == "carry_on")


def test_within_an_incident_a_trial_is_not_taken_for_its_twin() -> None:
    """Its state is its twin's again at once, because it learns nothing, but the rungs that it has used are used."""
    still = {"lr": 0.0, "name": "sgd", "beta1": 0.0}
    golden = trained(rung("carry_on", cool_down=6), detect="grad_norm_skip", **BEYOND, **still)
    found = run([golden, struck(golden, nan(value=1e10)), replace(golden, seed=2)], forks=True)
    (incident,) = found.result.incidents[1]
    assert incident["closed"] == START + 7 and found.result.masked_step[1] == START + 6


def test_a_detector_begins_anew_where_the_course_is_another() -> None:
    ladder = {"same": [rung("roll_back")], "other": [rung("roll_back+swap_data")]}
    scores = {}
    for name, rungs in ladder.items():
        golden = trained(*rungs, detect="finite+skip_step", **{"detect.skip_step": {"window": 8}})
        found = run([golden, struck(golden)])
        scores[name] = np.isfinite(found.signals["score_skip_step"][1])
    to = 8
    assert scores["same"][to:].all() and not scores["other"][to : to + 4].any() and scores["other"][to + 4 :].all()


def test_a_trial_that_forks_inside_of_an_incident_goes_on_in_it() -> None:
    """Its twin's own incident is open when its fault strikes: the rungs that are used are used."""
    golden = trained(rung("skip", limit=2, cool_down=100), rung("lower_rate+skip", limit=1, cool_down=100))
    of_twin = injector_of(struck(golden, nan(3)))
    others = [replace(golden, seed=seed) for seed in (2, 3)]  # so that the fault's row is a fork
    found = run([golden, struck(golden, nan(START, 2)), *others], {0: of_twin, 2: None}, forks=True)
    shared, own = found.result.incidents[1]
    assert shared["step"] == 3 and own["step"] == START
    assert [act["action"] for act in own["acts"]] == ["skip", "lower_rate", "skip"]


def test_the_embedding_alone_learns_less() -> None:
    golden = trained(rung("shrink_embedding+skip"))
    found = run([golden, struck(golden)])
    assert found.pack.remedies.embeddings([0, 1]) == {1: 0.1}
    norms = found.signals["grad_norm"]
    assert (
        np.array_equal(norms[0, :START], norms[1, :START])
        and (norms[1, START + 1 :] < norms[0, START + 1 :]).mean() > 0.5
    )


def test_a_changed_recipe_is_what_the_parts_read() -> None:
    golden = trained(rung("change_recipe+skip"))
    found = run([golden, struck(golden)], forks=True)
    assert found.pack.optimizer.trials[1].optim.beta2 == 0.9 and found.pack.optimizer.trials[0].optim.beta2 == 0.999


def test_moments_begin_anew() -> None:
    golden = trained(rung("reset_moments"))
    found = run([golden, struck(golden, nan(STEPS - 1))])
    assert not found.pack.optimizer.slot("moment_2")[1].any() and found.pack.optimizer.updates.tolist() == [STEPS, 0]


def test_where_the_scale_is_dynamic_an_overflow_is_no_alarm() -> None:
    options = {"precision": "fp16", "loss_scaling": "dynamic", "loss_scale": 2.0**40}
    found = run([trained(rung("skip"), **options), trained(rung("skip"), seed=2, **options)])
    assert (found.signals["loss_scale"][:, -1] < 2.0**40).all() and found.result.incidents == [[], []]


def test_a_pack_without_alarms_keeps_every_bit() -> None:
    """A playbook that never answers is no more than the memory that it takes."""
    watched = [trained(rung("roll_back"), seed=seed) for seed in range(2)]
    plain = [trial(seed=seed, **OWN) for seed in range(2)]
    ours, theirs = run(watched), run(plain)
    names = set(theirs.signals) - {"tokens_per_second", "step_seconds"}
    assert all(np.array_equal(ours.signals[name], theirs.signals[name], equal_nan=True) for name in names)
    assert torch.equal(ours.pack.weights, theirs.pack.weights)


class NoLook(TorchDispatchMode):
    """Raises where the host would have to wait for a device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), function
        return function(*args, **(kwargs or {}))


def test_judging_and_keeping_a_step_look_at_nothing_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAY_LOOK", ())
    looked: list[str] = []
    for cls in (Detection, Finite, Playbook):
        _watch(monkeypatch, cls, "judge", looked)
    _watch(monkeypatch, snapshots.Snapshots, "take", looked)
    watching = "+".join(name for name in DETECTORS if name not in ("expert_share", "gain_peers"))
    golden = trained(rung("roll_back"), detect=watching, steps=8)
    pack = pack_of([golden, replace(golden, seed=2)])
    train(pack, Agenda([None] * 2), 4, lambda first, arrays: None)
    assert looked.count("Detection.judge") == looked.count("Playbook.judge") == looked.count("Snapshots.take") == 8


def _watch(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, looked: list[str]) -> None:
    plain = getattr(cls, name)

    def noted(*arguments: Any) -> Any:
        looked.append(f"{cls.__name__}.{name}")
        with NoLook():
            return plain(*arguments)

    monkeypatch.setattr(cls, name, noted)


def test_the_host_waits_for_no_healthy_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked where there is no alarm, and the device is told of its rows once."""
    golden = trained(rung("roll_back"))
    pack = pack_of([golden, replace(golden, seed=2)])
    calls: list[tuple[str, int]] = []
    for name in ("alarm", "expect"):
        plain = getattr(Playbook, name)

        def noted(guard: Playbook, row: int, *arguments: Any, name: str = name, plain: Any = plain) -> Any:
            calls.append((name, row))
            return plain(guard, row, *arguments)

        monkeypatch.setattr(Playbook, name, noted)
    train(pack, Agenda([injector_of(golden)] * 2), 4, lambda first, arrays: None)
    assert calls == [("expect", 0), ("expect", 1)]


def test_the_time_of_a_step_is_that_of_a_pass_also_where_rows_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second a pass."""
    clock = [0.0]
    done = Clock.done

    def noted(*arguments: Any) -> Any:
        clock[0] += 1
        return done(*arguments)

    monkeypatch.setattr(signals.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Clock, "done", noted)
    golden = trained(rung("roll_back", limit=3), snapshot={"every": 1, "kept": 8})
    found = run([golden, struck(golden), struck(golden, nan(START + 5))], block=4)
    seconds, tokens = found.signals["step_seconds"], found.signals["tokens_per_second"]
    assert set(seconds[np.isfinite(seconds)]) <= {1 / 3, 1 / 2} and clock[0] > STEPS  # rows that are done may go
    assert (tokens[np.isfinite(tokens)] == golden.train.batch * golden.model.context).all()
