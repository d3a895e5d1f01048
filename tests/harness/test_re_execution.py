"""Steps that are run again: what is told by that, what is left of the fault, and what is looked at before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from harness.basics import devices
from harness.config import Data
from harness.data.screening import Scores
from harness.incidents import batches_ahead, snapshots
from harness.incidents.batches_ahead import is_like_the_text, is_odd, odd_batches
from harness.testing.engine import injector_of, left, pack_of, run, same_bits, trial
from harness.training.sites import Event, FaultSchedule, Site, SiteCall
from injectors.batch import BatchFault, DuplicatedBatch, RandomTokens, RareTokens, Repetition
from tests.harness.ladders import OWN, START, STEPS, nan, rung, struck, trained, verdicts


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

    def visit(self, site_call: Any) -> list[Any]:
        site_call.tensors["batch"].fill_(63)
        return [Event("batch", "batch", None, None, site_call.step, "a", "b", None, None, True)]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("looks", [True, False])
def test_a_batch_that_is_bad_is_bad_again_and_is_left_out(
    every: int, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a text of one rare token is 5, and none of the others' is beyond 4.8 after step 13.

    Where its tokens show that it is bad, another is tried second; where not, what else may be wrong is tried first.
    """
    if not looks:
        monkeypatch.setattr(batches_ahead, "RARER", np.inf)
        monkeypatch.setattr(batches_ahead, "MORE_REPEATED", np.inf)
    memory, ratio = {"every": every, "kept": 4}, {"detect.loss_ratio": {"ratio": 1.1}}
    golden = trained(rung("re_execute"), detect="loss_ratio", batch=16, snapshot=memory, **ratio)
    found = run([golden, golden], {1: Poison(START + 6)})
    assert found.result.incidents[0] == [] and verdicts(found, 1) == ["data"], found.result.incidents
    acts = [act["detail"].get("tried") for act in found.result.incidents[1][0]["acts"]]
    assert acts == [None, *([] if looks else ["spare"]), "other data", None]
    assert found.result.strikes[1] == (2 if looks else 3)  # at first, again, and on another device
    assert not np.array_equal(found.signals["loss"][0], found.signals["loss"][1])


@pytest.mark.parametrize("duration", [1, 5])
def test_batches_that_are_odd_are_left_out(duration: int) -> None:
    memory, text, start = {"every": 1, "kept": 4}, Data(source="stdlib"), 60
    fields = {"batch": 8, "context": 32, "steps": 70, "data": text}
    golden = trained(rung("re_execute"), detect="combined", snapshot=memory, **fields)
    found = run([golden, struck(golden, RareTokens(start=start, duration=duration))])
    first, other, last = found.result.incidents[1][0]["acts"]
    assert first["step"] == last["step"] == start and verdicts(found, 1)[0] == "data"
    assert first["detail"] == {"odd": duration} and last["detail"]["batches"] == duration
    assert other["detail"] == {"tried": "other data", "batches": duration}
    assert found.result.incidents[1][0]["steps_lost"] == 2 == found.result.strikes[1]  # at first, and again


@pytest.mark.parametrize("fault", [RandomTokens, RareTokens, Repetition])
@pytest.mark.parametrize(("duration", "odd"), [(1, [0, 1, 0]), (5, [0, 5, 1]), (9, [0, 0, 5])])
def test_a_batch_is_odd_by_its_tokens_alone(fault: type[BatchFault], duration: int, odd: list[int]) -> None:
    """Looked at from the step before, at the first, and at the fifth; at most eight. A look is none of its strikes."""
    golden = trial(seed=1, batch=8, context=32, **(OWN | {"steps": 60}), data=Data(source="stdlib"))
    faulty = struck(golden, fault(start=40, duration=duration))
    pack, fault_schedule = pack_of([golden, faulty]), FaultSchedule([None, injector_of(faulty)])
    assert [odd_batches(pack, fault_schedule, 1, step, 8) for step in (39, 40, 44)] == odd
    assert [odd_batches(pack, fault_schedule, 0, step, 8) for step in range(60)] == [0] * 60
    assert fault_schedule.strikes == [0, 0] and odd_batches(pack, fault_schedule, 1, 3, 8) == 0


def test_a_batch_that_is_an_earlier_one_again_is_odd() -> None:
    golden = trial(seed=1, batch=8, context=32, **(OWN | {"steps": 60}), data=Data(source="stdlib"))
    faulty = struck(golden, DuplicatedBatch(start=40, duration=5))
    pack, fault_schedule = pack_of([golden, faulty]), FaultSchedule([None, injector_of(faulty)])
    assert [odd_batches(pack, fault_schedule, 1, step, 8) for step in (39, 40, 44)] == [0, 5, 1]
    long = FaultSchedule([None, injector_of(struck(golden, DuplicatedBatch(start=30, duration=20)))])
    assert [odd_batches(pack, long, 1, step, 8) for step in (33, 42)] == [0, 0], (
        "more than eight, and more than a tenth"
    )


def test_what_the_text_has_itself_is_ordinary() -> None:
    """Windows of spaces alone, which are odd beside others and no rarity; but not random bytes."""
    corpus = pack_of([trial(data=Data(source="stdlib"))]).corpus
    scores = Scores(corpus.counts, 33, torch.device("cpu"))

    def values(tokens: torch.Tensor) -> tuple[float, float]:
        return float(scores.rarity(tokens).mean()), float(scores.repetition(tokens).mean())

    text = torch.from_numpy(corpus.train[: 33 * 400].astype(np.int64)).view(400, 1, 33)
    usual = [found for found in map(values, text) if found[1] < 0.15][:100]
    spaces, drawn = torch.full((1, 33), ord(" ")), torch.randint(0, 256, (1, 33), generator=torch.Generator())
    odd = [is_odd(values(tokens), usual) for tokens in (text[0], spaces, drawn)]
    ordinary = [is_like_the_text(tokens.numpy(), corpus) for tokens in (text[0], spaces, drawn)]
    assert (odd, ordinary) == ([False, True, True], [True, True, False])
    assert not is_like_the_text(spaces.repeat(64, 1).numpy(), corpus), "no batch is of 64 windows of spaces"


def test_batches_of_a_short_text_that_come_again_are_ordinary() -> None:
    short = Data(source="zipf", length=560, validation=0.5)
    golden = trial(seed=1, batch=1, context=256, **(OWN | {"steps": 60}), data=short)
    pack = pack_of([golden])
    batches = [pack.objective.batch(step)[0].tolist() for step in range(60)]
    again = [step for step in range(60) if batches[step] in batches[:step]]
    assert len(again) > 20, "or it shows nothing"
    assert [odd_batches(pack, FaultSchedule([None]), 0, step, 8) for step in range(30, 60)] == [0] * 30


def test_a_look_at_batches_leaves_a_fault_its_memory() -> None:
    golden = trial(seed=1, **OWN)
    faulty = struck(golden, DuplicatedBatch(start=START, duration=1))
    injector = injector_of(faulty)
    pack, fault_schedule = pack_of([golden, faulty]), FaultSchedule([None, injector])
    found = []
    for step in range(START + 1):
        batch = pack.batch(step)
        for number in fault_schedule.due(Site.BATCH, step):
            fault_schedule.visit(number, SiteCall(Site.BATCH, step, {"batch": batch[1]}))
        odd_batches(pack, fault_schedule, 1, step, 8)
        found.append(batch[1].clone())
    assert fault_schedule.changes == [0, 1] and torch.equal(found[-1], found[START - faulty.fault.late])


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

    def visit(self, site_call: Any) -> list[Any]:
        site_call.tensors["head"].mul_(-3.0 if site_call.step < self.nan_from else float("nan"))
        return [Event(site_call.site, "head", None, None, site_call.step, "a", "b", None, None, True)]


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
    late = breaking(lambda pack, row: pack.rows[row] == 1 and pack.row_steps.steps[row] >= 17)
    found = run([golden, golden], {0: None, 1: Poison(15)}, prepare=late)
    assert verdicts(found, 1) == ["data", "correct"]
    assert min(act["to"] for act in found.result.incidents[1][-1]["acts"] if act["to"] is not None) == 15


class Sleeper:
    """A weight is wrong from step 9 on, and its gradient NaN from 13 on."""

    taps, memory, calls = (), {}, [(Site.WEIGHT, 9)]

    def __init__(self, permanent: bool = False):
        self.permanent = permanent

    def recall(self, memory: Mapping[str, Any]) -> None: ...

    def visit(self, site_call: Any) -> list[Any]:
        site_call.tensors["head"].view(-1)[0] = 7.0
        return [Event(site_call.site, "head", None, None, site_call.step, "a", "b", None, None, True)]


def test_a_step_that_is_awaited_costs_no_history() -> None:
    """The oldest snapshot is still there, to which the next rung wants to go back."""
    prepare = breaking(lambda pack, row: pack.weights[row].abs().max() > 5 and pack.row_steps.steps[row] >= 13)
    options = {"playbook.re_execute": {"deepest": 0, "batches": 0}, "playbook.roll_back": {"back": 5}}
    memory = {"every": 5, "kept": 2}
    golden = trained(rung("re_execute"), rung("roll_back"), snapshot=memory, **options)
    found = run([golden, golden], {0: None, 1: Sleeper()}, prepare=prepare)
    assert verdicts(found, 1) == ["correct"] and same_bits(left(found, 0), left(found, 1)) == []
    deeper = trained(rung("re_execute"), snapshot=memory)
    found = run([deeper, deeper], {0: None, 1: Sleeper()}, prepare=prepare)
    assert verdicts(found, 1) == ["transient"] and same_bits(left(found, 0), left(found, 1)) == []


def test_another_device_is_tried_from_as_far_back_as_snapshots_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go less far than `deepest`; the wrong weight is not told by its size."""
    monkeypatch.setattr(snapshots, "GROWN", np.inf)
    prepare = breaking(lambda pack, row: pack.weights[row].abs().max() > 5 and pack.row_steps.steps[row] >= 13)
    golden = trained(rung("re_execute"), snapshot={"every": 1, "kept": 6})
    found = run([golden, golden], {0: None, 1: Sleeper(permanent=True)}, prepare=prepare)
    assert verdicts(found, 1) == ["persistent"] and same_bits(left(found, 0), left(found, 1)) == []


@pytest.mark.parametrize("every", [1, 4])
def test_two_faults_in_a_block_are_both_undone(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks once a block: a row that waits for it is kept under no step but its own."""
    monkeypatch.setattr(devices, "CPUS", ())
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


QUICK = {"playbook.re_execute": {"deepest": 0, "data": "odd"}}  # as `repair` has it


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize(("detector", "cost"), [("grad_norm_skip", 2), ("moment_bound", 4)])
def test_what_is_right_costs_two_steps_and_changes_no_bit(detector: str, cost: int, every: int) -> None:
    """Where no other rung answers it; four where the alarm is of the step before, whose steps are two."""
    low = {f"detect.{detector}": {"limit": 1e-6}}
    options = {**low, **QUICK, "signals": {"moment_size": 1}}
    snapshot = {"every": every, "kept": 8}
    plain = trial(seed=1, **OWN, signals={"moment_size": 1}, detect={"name": detector}, **low)
    asked = trained(rung("re_execute", limit=STEPS), detect=detector, snapshot=snapshot, **options)
    found, untouched = run([asked]), run([plain])
    told, incidents = verdicts(found, 0), found.result.incidents[0]
    assert len(told) > 3 and set(told) == {"correct"}
    assert same_bits(left(untouched, 0), left(found, 0)) == []
    if every == 1:
        lost, alarms = (sum(incident[key] for incident in incidents) for key in ("steps_lost", "alarms"))
        assert alarms >= STEPS - 1 and lost == cost * alarms
    assert {act["action"] for incident in incidents for act in incident["acts"]} == {"re_execute"}


def test_what_is_right_but_not_finite_cannot_be_trained_on() -> None:
    """A rate at which weights overflow: the same on both devices, and no other rung is left."""
    book = trained(rung("re_execute"), snapshot={"every": 1, "kept": 4}, **QUICK, **{"lr": 1e30})
    found, untouched = run([book]), run([trial(seed=1, **OWN | {"lr": 1e30})])
    assert found.result.outcome == untouched.result.outcome == ["non-finite"] and verdicts(found, 0)[-1] == "correct"
    assert found.result.nonfinite_step == untouched.result.nonfinite_step
