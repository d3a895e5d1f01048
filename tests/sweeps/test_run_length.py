"""A study at another length of its runs: what it has written for its own length keeps its place in the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analysis.reading.open_sweep import open_sweep
from harness.config import NO_FAULT, Trial, sections
from sweeps.compose.places import options
from sweeps.compose.run_length import FOLLOWING, scaled
from tests.sweeps import command
from tests.sweeps.command import trials, write_yaml

STUDIES = options("study")
OWN = """
train:
  steps: 100
  batch: 2
schedule:
  warmup: 10
  sequence_start: 8
  sequence_steps: 40
hydra:
  sweeper:
    params:
      fault: weight_bit,last_bit
      fault.start: 60
"""


LARGE = {"mitigations", "detectors_test", "playbook_test", "playbook"}  # thousands of trials


@cache
def as_written(study: str) -> list[Trial]:
    return trials(study=study)


def steps_of(study: str) -> int:
    (steps,) = {trial.train.steps for trial in as_written(study)}
    return steps


def moments(trial: Trial) -> Iterator[tuple[str, int | None]]:
    """Where in its run a trial does something, by key, in steps."""
    yield "schedule.warmup", trial.schedule.warmup
    yield "train.validate_every", trial.train.validate_every
    if trial.fault != NO_FAULT:
        fault: Any = vars(trial.fault)
        yield from ((f"fault.{name}", fault[name]) for name in ("start", "until") if name in fault)


# --- studies that are shipped ---------------------------------------------------------------------------------------


def test_a_part_of_the_largest_study_can_be_planned_at_another_length(empty: Path) -> None:
    part = ("mitigation=none,spam,batch_warmup", "seed=0", "idle=warn")
    done = command.call("study=mitigations", *part, "train.steps=400", "plan=true")
    assert (done.status, done.err) == (0, "")
    assert "study=mitigations is written for train.steps=" in done.out and not list(empty.iterdir())


@pytest.mark.parametrize("study", sorted(set(STUDIES) - LARGE))
def test_every_study_can_be_planned_at_another_length(study: str, empty: Path) -> None:
    steps = steps_of(study) // 2
    done = command.call(f"study={study}", f"train.steps={steps}", "plan=true")
    assert (done.status, done.err) == (0, "")
    said = f"study={study} is written for train.steps={2 * steps}; for {steps} steps: "
    assert (said in done.out) == (study != "grid") and not list(empty.iterdir())


@pytest.mark.parametrize(
    ("study", "factor"),
    [
        (study, factor)
        for study in sorted(set(STUDIES) - {"grid", "mitigations"})  # the latter has 6,432 trials
        for factor in (Fraction(1, 2), Fraction(2))[: 1 if study in LARGE else 2]
    ],
)
def test_moments_keep_their_place_in_the_run(study: str, factor: Fraction) -> None:
    before = as_written(study)
    after = trials(f"train.steps={int(factor * before[0].train.steps)}", study=study)
    assert len(after) == len(before)
    for one, other in zip(before, after, strict=True):
        for (key, value), (_, moved) in zip(moments(one), moments(other), strict=True):
            exact = value if value is None else value if value <= 1 else int(value * factor)
            assert moved == exact, (key, value, moved)
        assert other.fault == NO_FAULT or vars(other.fault)["start"] < other.steps


@pytest.mark.parametrize("study", sorted(set(STUDIES) - LARGE))
def test_at_its_own_length_a_study_is_what_it_was(study: str) -> None:
    ids = [trial.id for trial in as_written(study)]
    assert ids == [trial.id for trial in trials(f"train.steps={steps_of(study)}", study=study)]


def test_a_fault_strikes_in_a_short_run(empty: Path) -> None:
    """It has step 100 of 150."""
    small = ("model.width=16", "model.depth=1", "model.head_dim=8", "model.context=16", "train.batch=2")
    data = ("data.source=zipf", "data.vocabulary=32", "data.length=2000", "train.validate_tokens=16")
    asked = ("train.steps=12", "playbook=none", "fault.tensor=*", "seed=0", "idle=warn", "out=out")
    done = command.call("study=incident", *asked, *small, *data)
    assert done.status == 0 and "fault.start 100 -> 8, schedule.warmup 15 -> 1" in done.out
    sweep = open_sweep(empty / "out")
    struck = sweep.isel(trial=sweep.fault.values == "weight_bit")
    assert struck.strikes.values.tolist() == [1] and struck.fault_start.values.tolist() == [8]


# --- what follows the length, and what does not ---------------------------------------------------------------------


def test_mitigations_and_playbooks_that_a_study_chooses(empty: Path) -> None:
    longer = OWN.replace("steps: 100", "steps: 300")
    write_yaml(empty, "study/mine.yaml", f"{longer}      mitigation: batch_warmup\n      playbook: palm\n")
    before, after = (trials(f"train.steps={steps}", study="mine", folder=empty)[0] for steps in (300, 600))
    assert (before.schedule.batch_steps, after.schedule.batch_steps) == (50, 100)
    for action, field, usual in (("roll_back", "back", 100), ("skip_batches", "count", 200), ("snapshot", "every", 50)):
        name = f"playbook.{action}"
        assert (vars(before.section(name))[field], vars(after.section(name))[field]) == (usual, 2 * usual)


SHARES = re.compile(r"share of .*, where (\w+) is null")


def test_what_can_be_a_share_of_the_run_follows_it() -> None:
    pairs = {
        f"{part}.{found[1]}"
        for part, section in sections().items()
        for field in section.__dataclass_fields__.values()
        if (found := SHARES.search(field.metadata.get("help", "")))
    }
    assert pairs >= {"schedule.warmup", "model.branch_steps", "adagc.warmup", "spam.interval", "stable_spam.interval"}
    assert pairs <= FOLLOWING


def test_resets_and_warm_ups_of_optimizers_and_clippers(empty: Path) -> None:
    """At 50 steps and no shorter interval nothing would be reset."""
    own = "spam: {interval: 50, warmup: 20, grace: 4}\nadagc: {warmup: 30}\nzclip: {warmup: 8}\n"
    write_yaml(empty, "study/mine.yaml", f"{own}{OWN}      mitigation: spam,adagc,zclip\n")
    for steps, moved in ((100, (50, 20, 4, 30, 8)), (50, (25, 10, 2, 15, 4))):
        found = {t.mitigation: t for t in trials(f"train.steps={steps}", study="mine", folder=empty)}
        spam = found["spam"].section("spam")
        warmups = (found[name].section(name).warmup for name in ("adagc", "zclip"))
        assert (spam.interval, spam.warmup, spam.grace, *warmups) == moved


def test_every_step_stays_every_step() -> None:
    """`repair` and `oracle` go back to a snapshot of the step before."""
    for trial in trials("train.steps=300", "playbook=repair", study="incident"):
        assert trial.section("playbook.snapshot").every == 1


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ("schedule.warmup=10", "schedule.warmup", 10),
        ("fault.start=40", "fault.start", 40),
        ("mitigation=sequence_warmup", "schedule.sequence_steps", 50),
        ("train.validate_every=7", "train.validate_every", 7),
    ],
)
def test_what_the_command_line_gives_is_taken_as_it_is(given: str, field: str, value: int, empty: Path) -> None:
    write_yaml(empty, "study/mine.yaml", OWN)
    section, name = field.split(".")
    found = trials("train.steps=50", given, study="mine", folder=empty)
    assert {getattr(getattr(trial, section), name) for trial in found} == {value}


def test_studies_of_ones_own_and_several_lengths_at_once(empty: Path) -> None:
    write_yaml(empty, "study/mine.yaml", OWN)
    found = trials("train.steps=50,100,200", "fault=weight_bit", study="mine", folder=empty)
    rows = [(t.train.steps, t.schedule.warmup, t.schedule.sequence_steps, t.fault.start) for t in found]
    assert rows == [(50, 5, 20, 30), (100, 10, 40, 60), (200, 20, 80, 120)]
    asked = command.tiny("--config-dir=.", "study=mine", "plan=true", "train.steps=50,200", "fault=weight_bit")
    lines = command.call(*(text for text in asked if not text.startswith("schedule.")), "idle=warn").out.splitlines()
    said = "study=mine is written for train.steps=100; for "
    moved = "schedule.sequence_steps 40 ->"
    assert [line.startswith(said) and moved in line for line in lines[:2]] == [True, True]


def test_a_study_without_a_length_of_its_own_stays_as_it_is(empty: Path) -> None:
    write_yaml(empty, "study/mine.yaml", OWN.replace("  steps: 100\n", ""))
    write_yaml(empty, "study/longer.yaml", "defaults: [incident, _self_]\ntrain:\n  steps: 300\n")
    assert trials("train.steps=90", study="mine", folder=empty)[0].schedule.warmup == 10
    longer = trials("fault=weight_bit", study="longer", folder=empty)[0]
    assert (longer.schedule.warmup, longer.fault.start) == (15, 100)
    again = trials("fault=weight_bit", "train.steps=600", study="longer", folder=empty)[0]
    assert (again.schedule.warmup, again.fault.start) == (30, 200)


@pytest.mark.parametrize(
    ("value", "moved"), [(None, None), (0, 0), (1, 1), (2, 1), (3, 1), (75, 37), (149, 74), (150, 75), (-100, -50)]
)
def test_rounding_stays_within_the_run(value: int | None, moved: int | None) -> None:
    assert scaled(value, 150, 75) == moved
