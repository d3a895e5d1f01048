"""Incidents by their written rules, on runs that are made for them; the log of playbooks; words on pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from analysis.again.batches import Setup
from analysis.again.sweep_folder import SweepFolder
from analysis.measures.anomalies import TrialSignals
from analysis.measures.causes import GRADIENT, UNKNOWN, WEIGHT, cause_of
from analysis.measures.evidence import evidence_of
from analysis.measures.incidents import AFTER, APART, BEFORE, LEFT, WATCHING, Incident, of_one, runs, worst
from analysis.reading.incident_log import Act, Logged, log_of, logs_of, number
from analysis.reading.open_sweep import open_sweep
from analysis.reports.follow_ups import followed
from analysis.reports.words import html_lines, markdown_block, markdown_text
from harness.config import Trial
from harness.storage.records import Unreadable
from harness.storage.results_folder import ResultsPath
from harness.storage.stored import PackInfo, read_packs
from tests.analysis import synthetic

STEPS, BEGIN = 900, 200
LAYERS = 2


def run_of(
    loss: np.ndarray, golden: np.ndarray | None = None, outcome: str = "trained", **changes: np.ndarray
) -> TrialSignals:
    """A run in which all but the loss is steady."""
    steps = len(loss)
    noise = 1 + 0.01 * np.random.default_rng(5).standard_normal(steps)
    signals: dict[str, np.ndarray] = {name: noise.copy() for name in ("grad_norm", "param_norm", "second_moment_norm")}
    signals |= {"update_rms": 1e-3 * noise, "learning_rate": np.full(steps, 1e-2), "loss_scale": np.ones(steps)}
    signals |= {"tokens": 256.0 * (1 + np.arange(steps)), "step_seconds": np.full(steps, 0.5)}
    signals |= {name: np.ones((steps, LAYERS)) for name in ("activation_rms", "attention_logit_max")}
    return TrialSignals("a", signals | {"loss": loss} | changes, np.ones(steps, bool), {}, outcome, None, golden)


def calm(seed: int = 0) -> np.ndarray:
    return 3 + 0.01 * np.random.default_rng(seed).standard_normal(STEPS)


def spiked(height: float, left: float) -> np.ndarray:
    loss = calm()
    loss[BEGIN : BEGIN + 5] += height
    loss[BEGIN + 5 :] += left
    return loss


def only(run: TrialSignals, log: list[Logged] | None = None, cost: float = 0.0) -> Incident:
    (incident,) = of_one(run, log, cost, is_asked=True)
    return incident


def test_a_calm_run_has_none() -> None:
    assert of_one(run_of(calm()), None) == []


def test_an_alarm_of_what_is_known_when_a_step_is_over_is_of_that_step() -> None:
    run = run_of(calm(), weights_changed=np.where(np.arange(STEPS) == BEGIN, 1.0, 0.0))
    sounds = np.arange(STEPS) == BEGIN + 1
    run = replace(run, said={"checksum": (sounds, np.where(sounds, 1.0, 0.0))})
    (incident,) = of_one(run, None)
    assert (incident.first, incident.last) == (BEGIN, BEGIN)
    assert [(one.detector, one.step) for one in incident.alarms] == [("checksum", BEGIN + 1)]


def test_a_large_gradient_alone_is_none_unless_somebody_asks() -> None:
    """As an unusual batch gives it to a healthy run: 10 of 30 clean trials of the quickstart had such an incident."""
    run = run_of(calm())
    run["grad_norm"][BEGIN] *= 3
    assert run.anomalies["grad_norm"][BEGIN] and of_one(run, None) == []
    asked = only(run)
    assert asked.first == BEGIN and not asked.is_sure and asked.signs == ()


@pytest.mark.parametrize(
    ("signal", "factor", "sign"),
    [("update_rms", 3, "jump of the update"), ("activation_rms", 5, "jump of activations")]
    + [("loss_scale", 4, "jump of the loss scale")],
)
def test_a_sign_is_named(signal: str, factor: float, sign: str) -> None:
    run = run_of(calm())
    run[signal][BEGIN] *= factor
    (incident,) = of_one(run, None)
    assert incident.is_sure and incident.row["signs"] == sign and incident.first == BEGIN


def test_one_at_a_step_that_the_run_never_came_to_again() -> None:
    """The loader ended while a playbook passed over batches: its last step stands for it, and nothing is lost."""
    seen = Act(step=STEPS + 2, action="re_execute", detectors={"combined": 3.0}, loss=5.0, grad_norm=2.0)
    (incident,) = of_one(run_of(calm()), [Logged(step=STEPS + 1, last=STEPS + 3, alarms=1, steps_lost=4, acts=(seen,))])
    assert (incident.first, incident.last, incident.steps) == (STEPS - 1, STEPS - 1, 4)
    assert incident.loss_peak == 5.0 and incident.row["outcome"] == "recoverable"


def test_an_alarm_of_combined_is_one_where_it_is_certain() -> None:
    """With the spike of the loss around it; of a lower score it is none, and goes on what has begun."""
    run, score = run_of(spiked(1.0, 0.0)), np.zeros(STEPS)
    for value, count in ((1.5, 0), (2.5, 1)):
        score[BEGIN] = value
        heard = replace(run, said={"combined": (score > 1, score)})
        found = of_one(heard, None)
        assert len(found) == count and all((one.first, one.last) == (BEGIN, BEGIN + 4) for one in found)


@pytest.mark.parametrize(("left", "outcome"), [(0.0, 1), (0.008, 1), (0.03, 2)])
@pytest.mark.parametrize("has_golden", [True, False])
def test_what_is_left_tells_lingering_from_recoverable(left: float, outcome: int, has_golden: bool) -> None:
    incident = only(run_of(spiked(1.0, left), calm() if has_golden else None))
    assert (incident.first, incident.outcome) == (BEGIN, outcome)
    assert incident.left == pytest.approx(left, abs=1e-12 if has_golden else 0.005)
    assert incident.loss_peak == pytest.approx(4, abs=0.05) and incident.peak_step - BEGIN in range(5)
    assert incident.after_step == min(STEPS, BEGIN + AFTER) - 1
    assert LEFT == 0.015 and BEFORE == 50


def test_what_falls_anyway_is_judged_by_the_undisturbed_run() -> None:
    """A loss that falls hides what is left of a spike; the golden twin does not."""
    fall = 1.0 * np.exp(-np.arange(STEPS) / 200)
    hidden, seen = (only(run_of(spiked(1.0, 0.05) + fall, golden)) for golden in (None, calm() + fall))
    assert (hidden.outcome, seen.outcome) == (1, 2) and seen.left == pytest.approx(0.05)


def test_what_ends_in_nan_is_divergent_and_costs_all_that_was_to_come() -> None:
    loss = calm()
    loss[BEGIN + 20 :] += 5
    loss = loss[: BEGIN + 40]
    loss[-1] = np.nan
    incident = only(run_of(loss, outcome="non-finite"), cost=3600.0)
    assert (incident.outcome, incident.steps) == (3, BEGIN + 40 - incident.first)
    assert incident.seconds == pytest.approx(incident.steps * 0.5) == incident.money
    assert incident.tokens == incident.steps * 256


def test_what_lies_apart_is_another_incident() -> None:
    loss = spiked(1.0, 0.0)
    loss[BEGIN + APART + 30 : BEGIN + APART + 33] += 2.0
    first, second = of_one(run_of(loss), None)
    assert (first.first, second.first) == (BEGIN, BEGIN + APART + 30)
    assert worst([first, second]) == second and worst([]) is None


def test_one_signal_is_enough() -> None:
    norm = run_of(calm())["grad_norm"].copy()
    norm[BEGIN] *= 5
    incident = only(run_of(calm(), grad_norm=norm))
    assert (incident.first, incident.last, incident.symptoms) == (BEGIN, BEGIN, ())


# --- runs of a sweep ---------------------------------------------------------------------------------------------


def noise(trial: Trial) -> np.ndarray:
    return 3 + 0.01 * np.random.default_rng(trial.seed).standard_normal(trial.train.steps)


def sweep_of(out: Path, *trials: Trial, loss: Callable[[Trial], np.ndarray] = noise) -> xr.Dataset:
    """A pack for each trial."""
    for trial in trials:
        synthetic.write_pack(out, [trial], loss, block=trial.train.steps)
    sweep = open_sweep(out).load()
    sweep["dropped"][:], sweep["learning_rate"][:] = 0, 1e-6  # below any schedule's
    return sweep


def test_layers_that_a_shallower_trial_does_not_have_are_not_broken(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, *(synthetic.make_trial(depth=depth, steps=200) for depth in (1, 3)))
    shallow, deep = runs(sweep)
    assert (shallow["activation_rms"].shape, deep["activation_rms"].shape) == ((200, 1), (200, 3))
    shallow["loss"][100] += 1
    found = evidence_of(shallow, only(shallow), None)
    assert found.is_activation_finite and found.activation_ratio == 1


def test_alarms_of_a_trial_that_nothing_watched_do_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, *(synthetic.make_trial(seed=seed, steps=60) for seed in range(2)))
    sweep["grad_norm"][:, 40] = np.inf
    heard = np.array([[1.0] * 60, [np.nan] * 60])
    sweep["alarm_finite"] = sweep["score_finite"] = ("trial", "step"), heard
    watched, other = (run.said["finite"][0] for run in runs(sweep))
    assert watched.all() and np.flatnonzero(other).tolist() == [40]


def test_only_what_marks_incidents_is_replayed(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, synthetic.make_trial(steps=60))
    (few,), (many,) = runs(sweep), runs(sweep, heard=None)
    assert set(few.said) == set(WATCHING) < set(many.said)


def test_a_dropped_batch_is_no_incident(tmp_path: Path) -> None:
    """The run stands still there: its norms of nothing are no signal, and a mean of squares has no new square."""
    sweep = sweep_of(tmp_path, synthetic.make_trial(steps=200))
    values = {"loss": np.nan, "dropped": 4, "grad_norm": 0, "update_rms": 0}
    for name, value in values.items():
        sweep[name][0, 100] = value
    sweep["grad_norm"][0, 99], sweep["second_moment_norm"][0, 99:] = 0.5, 0.9625
    setup = Setup(0.95, None, 1, "fp32", True, (1.0,) * 200, 0.9)
    (run,) = runs(sweep, {str(sweep["trial"].values[0]): setup})
    assert run["loss"][100] == run["loss"][99] and run["grad_norm"][100] == 0.5
    assert not run.anomalies["second_moment_norm check"][100] and not of_one(replace(run, setup=None), None)


def test_a_relative_that_died_of_something_else_did_not_fare_better(tmp_path: Path) -> None:
    """It has no incident at the steps of this one, because it had ended long before."""

    def loss(trial: Trial) -> np.ndarray:
        values = noise(trial)
        values[120:123] += 1
        values[25 if trial.mitigation == "qk_norm" else 220 :] = np.nan
        return values

    trials = [synthetic.make_trial(mitigation=name, steps=220) for name in ("none", "qk_norm")]
    sweep = sweep_of(tmp_path, *trials, loss=loss)
    sweep["tokens"][1, 26:] = np.nan
    (run, _) = runs(sweep)
    said, table = followed(SweepFolder(tmp_path, sweep, list(read_packs(tmp_path))), only(run))
    assert said == ["None of 1 other trials with the same fault and seed fared better."]
    assert table["outcome"].tolist() == ["recoverable", "divergent"] and table["steps lost"][1] == 195


def test_what_would_have_helped_is_named_by_all_that_differs_and_weighed_by_its_cost(tmp_path: Path) -> None:
    """One came back further, at the cost of more steps; two with the same mitigation differ by their rate."""

    def loss(trial: Trial) -> np.ndarray:
        values = noise(trial)
        is_plain = trial.mitigation == "none"
        values[120 : 123 if is_plain else 130 if trial.optim.lr < 0.05 else 122] += 1
        values[123:] += 0.03 * is_plain
        return values

    named = [("none", 0.01), ("qk_norm", 0.01), ("qk_norm", 0.1)]
    trials = [synthetic.make_trial(mitigation=name, lr=lr, steps=220) for name, lr in named]
    sweep = sweep_of(tmp_path, *trials, loss=loss)
    run = next(iter(runs(sweep, chosen=[trials[0].id])))
    said, _ = followed(SweepFolder(tmp_path, sweep, list(read_packs(tmp_path))), only(run))
    assert said == [
        "as it was: lingering, 3 steps lost.",
        "1 of 2 other trials with the same fault and seed fared better:",
        "mitigation=qk_norm optim.lr=0.1: recoverable, 2 steps lost.",
        "1 of 2 other trials with the same fault and seed came back further, but lost more steps:",
        "mitigation=qk_norm: recoverable, 15 steps lost.",
    ]


# --- the log -----------------------------------------------------------------------------------------------------

ENTRY: dict[str, Any] = {
    "step": BEGIN,
    "last": BEGIN + 3,
    "closed": BEGIN + 40,
    "alarms": 4,
    "steps_lost": 12,
    "acts": [
        {
            "step": BEGIN,
            "detectors": {"skip_step": 9.5, "finite": "inf"},
            "loss": "nan",
            "grad_norm": 4.5,
            "action": "roll_back",
            "to": BEGIN - 10,
            "detail": {"snapshot": 19},
        }
    ],
}


def pack_of(tmp_path: Path, **attributes: Any) -> PackInfo:
    known = {"ids": ["a", "b"], "complete": True}
    return PackInfo(ResultsPath.at(tmp_path) / "pack", known | attributes, {})


def test_the_log_is_read_as_it_is_written(tmp_path: Path) -> None:
    logs = log_of(pack_of(tmp_path, incidents=[[ENTRY], []]))
    (logged,) = logs["a"]
    assert logs["b"] == [] and (logged.step, logged.closed, logged.steps_lost) == (BEGIN, BEGIN + 40, 12)
    assert logged.acts[0] == Act(**ENTRY["acts"][0]) and np.isnan(number(logged.acts[0].loss))
    assert number(logged.acts[0].detectors["finite"]) == np.inf


def test_a_store_without_a_log_has_none(tmp_path: Path) -> None:
    assert log_of(pack_of(tmp_path)) == {} == logs_of([pack_of(tmp_path, incidents=[[ENTRY], []], complete=False)])


@pytest.mark.parametrize("damaged", [[[ENTRY]], 5, [[ENTRY | {"step": "soon"}], []], [[{"step": 3}], []], ["x", []]])
def test_a_damaged_log_is_left_out(tmp_path: Path, damaged: Any) -> None:
    pack = pack_of(tmp_path, incidents=damaged)
    with pytest.raises(Unreadable):
        log_of(pack)
    assert logs_of([pack]) == {}


def test_an_incident_of_the_log_is_told_as_it_was() -> None:
    """Its spike is not in the signals any more, since the row went back."""
    (logged,) = log_of(pack_of(Path("/x"), incidents=[[ENTRY], []]))["a"]
    incident = only(run_of(calm()), [logged], cost=36.0)
    assert incident.is_logged and (incident.first, incident.last, incident.steps) == (BEGIN, BEGIN + 40, 12)
    assert {one.detector: one.score for one in incident.alarms} == {"skip_step": 9.5, "finite": np.inf}
    assert incident.row["action"] == "roll_back" and incident.grad_norm_peak == 4.5
    assert incident.money == pytest.approx(12 * 0.5 / 100)
    assert incident.loss_peak == np.inf, "the loss was NaN at the alarm"
    louder = replace(logged, acts=(replace(logged.acts[0], loss=8.0),))
    told = only(run_of(calm()), [louder])
    assert (told.loss_peak, told.peak_step) == (8.0, louder.acts[0].step)


@pytest.mark.filterwarnings("error")
def test_evidence_is_what_the_log_saw_where_a_rollback_took_it_out_of_the_signals() -> None:
    seen = Act(step=BEGIN, action="roll_back", to=BEGIN - 10, loss=3.0, grad_norm=40.0)
    run, log = run_of(calm()), [Logged(step=BEGIN, last=BEGIN, alarms=1, steps_lost=10, acts=(seen,))]
    found = evidence_of(run, only(run, log), None)
    assert (found.begin, found.odd) == (BEGIN, ("grad_norm",)) and found.norm_ratio == pytest.approx(40, rel=0.05)
    assert cause_of(replace(found, is_batch_seen=True)).cause == GRADIENT
    assert run["grad_norm"][BEGIN] < 2, "the run itself is as it was"


@pytest.mark.parametrize(
    ("loss", "before", "cause"), [(3.0, 0, GRADIENT), (3.0, 1, GRADIENT), (2.5, 0, WEIGHT), (2.5, 1, UNKNOWN)]
)
def test_of_a_step_that_was_run_again_the_loss_tells_where_it_was_wrong(loss: float, before: int, cause: str) -> None:
    """From steps before it on, it tells only that these were."""
    detail = {"before": before} if before else {}
    seen = Act(step=BEGIN, action="re_execute", detectors={"finite": 1.0}, loss=3.0, grad_norm=40.0, detail=detail)
    ruled = Act(step=BEGIN, action="re_execute", loss=loss, grad_norm=1.0, detail={"verdict": "transient"})
    run, log = run_of(calm()), [Logged(step=BEGIN, last=BEGIN, alarms=1, steps_lost=1, acts=(seen, ruled))]
    found = cause_of(evidence_of(run, only(run, log), None))
    assert found.cause == cause and ("1 before" in found.reason) == (cause == UNKNOWN)


# --- words -------------------------------------------------------------------------------------------------------


def test_text_of_a_store_is_no_markup() -> None:
    assert markdown_text("a|b `c` [d](e) <script>\n#") == r"a\|b \`c\` \[d\](e) \<script\>\\n\#"
    block = markdown_block("x```\n# no heading\x1b[2J")
    fence = block.split("text\n")[0]
    assert fence == "````" and block.endswith(f"\n{fence}") and "\x1b" not in block
    assert html_lines("<b>\n&") == "&lt;b&gt;\n&amp;"
