"""Every answer to an alarm, and every playbook: what it does to the trial, and that it does nothing to any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.basics import devices
from harness.recovery.table import ACTIONS
from harness.testing.engine import (
    assert_fork_equals_full_run,
    assert_resumes,
    assert_same_trials,
    injector_of,
    left,
    run,
    same_bits,
)
from harness.training import signals
from harness.training.row_steps import RowSteps
from harness.training.signals import Recorder
from harness.training.sites import Event, Site
from tests.harness.ladders import SNAPSHOT, START, STEPS, nan, rung, struck, trained, verdicts

ELSEWHERE = {"carry_on", "match_sampler", "raise_penalty", "reset_reference"}  # of policies: test_policy_answers.py
LADDERS = {name: [rung("undo", "oracle")] if name == "undo" else [rung(name)] for name in ACTIONS}
LADDERS = {name: rungs for name, rungs in LADDERS.items() if name not in ELSEWHERE}
LADDERS |= {
    "anticipate": [rung("anticipate+skip")],
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

    def visit(self, site_call: Any) -> list[Any]:
        self.visits += 1
        if self.visits in (1, 4):  # the weights at first, the gradient the second time
            site_call.tensors["head"].fill_(float("nan") if site_call.site == Site.WEIGHT else float("inf"))
            return [Event(site_call.site, "head", None, None, site_call.step, "a", "b", None, None, True)]
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


@pytest.mark.parametrize("step", [0, START, STEPS - 1])
def test_a_rung_acts_at_a_fixed_step(step: int) -> None:
    """Of each trial its own."""
    ladder = rung("lower_rate", "at_step", limit=1)
    found = run([trained(ladder, detect="at_step", **{"detect.at_step": {"step": at}}) for at in (step, 99)])
    rates = found.signals["learning_rate"]
    assert np.array_equal(rates[0, : step + 1], rates[1, : step + 1])
    assert np.allclose(rates[0, step + 1 :], 0.5 * rates[1, step + 1 :]) and not found.result.incidents[1]
    assert [act["step"] for act in found.result.incidents[0][0]["acts"]] == [step]
    assert np.flatnonzero(found.signals["alarm_at_step"][0]).tolist() == [step]


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
            state[pack.row_steps.steps[1]] = {"taken": stepping[1].clone(), **changed(before, state_of(pack, 1))}
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
@pytest.mark.parametrize(("ranks", "cpus"), [(1, ("cpu",)), (2, ())])
@pytest.mark.parametrize("site", ["reduced_gradient", "gradient", "weight", "moment_2", "activation"])
def test_with_the_same_data_a_transient_fault_leaves_nothing(
    action: str, ranks: int, site: str, cpus: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole trial is its golden twin, bit for bit, its detectors' memory included; also where the host looks once
    a block, as on a GPU."""
    monkeypatch.setattr(devices, "CPUS", cpus)
    where = {"tensor": "blocks.0.residual"} if site == "activation" else {}
    detector = "oracle" if action == "undo" else "any"
    golden = trained(rung(action, detector), detect="finite+skip_step", ranks=ranks)
    found = run([golden, struck(golden, nan(site=site, **where))], forks=True, block=5)
    assert same_bits(left(found, 0), left(found, 1)) == [] and found.result.digest[0] == found.result.digest[1]
    assert found.result.strikes == [0, 1] and found.pack.rows_state.equal(0, 1)
    (incident,) = found.result.incidents[1]
    assert incident["acts"][0]["to"] <= START


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
@pytest.mark.parametrize("cpus", [("cpu",), ()])
def test_snapshots_may_lie_in_main_memory(where: str, cpus: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same where the host looks which rows are sound, and where it does not."""
    monkeypatch.setattr(devices, "CPUS", cpus)
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
    heard = to + 3  # the values before the one that fills half of the window
    assert scores["same"][to:].all() and not scores["other"][to:heard].any() and scores["other"][heard:].all()


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
    assert found.pack.interventions.embeddings([0, 1]) == {1: 0.1}
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


def test_the_time_of_a_step_is_that_of_a_pass_also_where_rows_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second a pass."""
    clock = [0.0]
    done = RowSteps.done

    def noted(*arguments: Any) -> Any:
        clock[0] += 1
        return done(*arguments)

    monkeypatch.setattr(signals.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(RowSteps, "done", noted)
    golden = trained(rung("roll_back", limit=3), snapshot={"every": 1, "kept": 8})
    found = run([golden, struck(golden), struck(golden, nan(START + 5))], block=4)
    seconds, tokens = found.signals["step_seconds"], found.signals["tokens_per_second"]
    assert set(seconds[np.isfinite(seconds)]) <= {1 / 3, 1 / 2} and clock[0] > STEPS  # rows that are done may go
    assert (tokens[np.isfinite(tokens)] == golden.train.batch * golden.model.context).all()
