"""`extend`: a longer trial is that of one command, bit for bit, and nothing is lost by a kill."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import analysis
from harness.config import Model, Optim, Schedule, Trial
from harness.config.trial import sections
from harness.optim import schedules
from harness.storage.progress_files import ProgressFile, read_asked, read_progress
from harness.storage.store import open_store
from harness.storage.stored import complete_trials, read_packs
from harness.training import longer as module
from harness.training.longer import SHARES, goes_on_from, longer, shared_steps
from tests.sweeps import command
from tests.sweeps.test_everyday import call, changes, killed_at, same, trained

GRID = ("optim.lr=1e-3,1e-2", "mitigation=none,qk_norm", "fault=none,weight_bit", "fault.start=2", "keep=state")
LADDER = "playbook.ladder=[{detector: any, action: roll_back, limit: 3, cool_down: 5}]"
ONE = "hydra.launcher.workers=1"
ROLLS_BACK = ("detect=loss_ratio", "detect.loss_ratio.ratio=1.01", "detect.loss_ratio.span=2", LADDER)


def extended(out: Path, capsys, steps: int, *words: str) -> str:
    status, said, err = call(capsys, "extend", str(out), "--steps", str(steps), *words, ONE)
    assert status == 0, said + err
    return said


def finite(out: Path, steps: int):
    """The trials of about so many steps that were trained to their end, less the padding of longer ones."""
    sweep = analysis.open_sweep(out)
    chosen = (abs(sweep["steps"] - steps) <= 3) & (sweep["outcome"] != "non-finite")
    return sweep.isel(trial=np.flatnonzero(chosen), step=slice(steps))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("short") / "out"
    return trained(out, *GRID, "schedule.decay=wsd", "train.steps=10")


def copied(out: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", str(out), str(folder)], check=True)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("schedule.decay=wsd",),
        ("schedule.decay=constant", "schedule.warmup=null", "schedule.warmup_share=0.3", "telemetry.block=50"),
        ("schedule.decay=constant", "schedule.batch_start=1", "schedule.batch_steps=3", "train.validate_every=4"),
        ("schedule.decay=constant", "fault.duration=null", "train.ranks=2"),
        ("schedule.decay=wsd_linear", *ROLLS_BACK),
    ],
    ids=["wsd", "shares", "growth", "permanent", "rolled_back"],
)
def test_a_longer_trial_is_that_of_one_command(words: tuple[str, ...], tmp_path: Path, capsys) -> None:
    """All that is stored of it but clocks; with faults before the state and after it, and rows that went back."""
    out = trained(tmp_path / "short", *GRID, *words, "train.steps=11")
    before = finite(out, 11)
    said = extended(out, capsys, 24)
    assert "to train in" in said
    pinned = [f"schedule.warmup={3 if 'schedule.warmup=null' in words else 2}"]
    rest = [word for word in words if word != "schedule.warmup=null"]
    whole = trained(tmp_path / "whole", *GRID, *rest, *pinned, "train.steps=24")
    one, other = finite(out, 24), finite(whole, 24)
    assert set(one["trial"].values) <= set(other["trial"].values) and one.sizes["trial"] >= 4
    if words[-1] == LADDER:
        records = [
            incident for pack in read_packs(out) for of_trial in pack.attributes["incidents"] for incident in of_trial
        ]
        assert len(records) > 4
    told = ["pack", "warmup"]  # the warm-up is an axis where there are shorter trials beside
    same(*(x.drop_vars(told, errors="ignore") for x in (one, other.sel(trial=one["trial"].values))))
    same(finite(out, 11).drop_vars("warmup", errors="ignore"), before)
    assert call(capsys, "verify", str(out))[1].endswith("every file is as it was written\n")


def test_it_goes_on_again_and_knows_what_was_asked_for(short: Path, tmp_path: Path, capsys) -> None:
    out = copied(short, tmp_path / "out")
    extended(out, capsys, 20)
    extended(out, capsys, 30, "--where", "steps=20")
    whole = trained(tmp_path / "whole", *GRID, "schedule.decay=wsd", "train.steps=30")
    one = finite(out, 30)
    same(one, finite(whole, 30).sel(trial=one["trial"].values))
    asked = read_asked(out)
    assert set(asked.trials) == complete_trials(out) and "train.steps=10" in (asked.words or ())
    assert "0 to train" in extended(out, capsys, 30, "--where", "steps=20")
    assert "0 to train" in call(capsys, "retry", str(out))[1]


def test_a_few_of_a_pack_go_on_with_their_twins(short: Path, tmp_path: Path, capsys) -> None:
    """The rest of the pack is not recorded; its twin is, since the faulty trial is nothing without it."""
    out = copied(short, tmp_path / "out")
    said = extended(out, capsys, 40, "--where", "fault=weight_bit", "--where", "mitigation=qk_norm")
    now = analysis.open_sweep(out)
    new = now.isel(trial=np.flatnonzero(now["steps"] == 40))
    assert f"{new.sizes['trial']} trials asked for" in said and set(new["fault"].values) == {"none", "weight_bit"}
    assert set(new["golden"].values) <= set(new["trial"].values)
    whole = trained(tmp_path / "whole", *GRID, "schedule.decay=wsd", "train.steps=40")
    same(new, analysis.open_sweep(whole).sel(trial=new["trial"].values))


def test_an_extension_that_is_killed_goes_on(short: Path, tmp_path: Path, capsys) -> None:
    number = changes("extend", str(copied(short, tmp_path / "all")), "--steps", "20", "checkpoint.every=3", ONE)
    expected = analysis.open_sweep(tmp_path / "all")
    assert number > 50
    # Files of progress are written by the clock, so another run may have a few changes less.
    for place, change in enumerate(np.linspace(1, 0.85 * number, 4).astype(int)):
        out = copied(short, tmp_path / str(place))
        words = ("extend", str(out), "--steps", "20", "checkpoint.every=3", ONE)
        assert killed_at(change, *words).returncode == -signal.SIGKILL
        same(finite(out, 10), finite(short, 10))
        assert call(capsys, *words)[0] == 0
        same(analysis.open_sweep(out), expected)
        assert call(capsys, "verify", str(out))[0] == 0


def test_a_row_that_goes_back_behind_the_state_is_no_error_of_progress(tmp_path: Path) -> None:
    """Nor where a pack goes on from a checkpoint: the steps that are done may be fewer than it began with."""
    folder = open_store(tmp_path / "out", "grid")
    file = ProgressFile(folder / "progress" / "p.json", of=20, trials=2)
    file.begin(8)
    file._write(5)
    progress, damaged = read_progress(tmp_path / "out" / "progress")
    assert not damaged and (progress["p"].begun, progress["p"].steps) == (5, 5)


# --- what cannot go on -------------------------------------------------------------------------------------------


def refused(capsys, *words: str) -> str:
    status, said, err = call(capsys, "extend", *words)
    assert status == 2 and said == "", said
    return err


def test_a_rate_that_has_fallen_is_told_with_what_can_be_done(tmp_path: Path, capsys) -> None:
    words = (*GRID, "train.steps=10", "schedule.decay=cosine,constant")
    out = tmp_path / "out"
    ended = command.call(*command.tiny(f"out={out}", *words))
    assert "keep=state: schedule.decay=cosine: the rate of each step depends on the length of the run" in ended.out
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    said = refused(capsys, str(out), "--steps", "20")
    assert "schedule.decay=cosine: the learning rate of" in said and "had fallen since step 2" in said
    start = said.partition("model.start=")[2].partition(",")[0]
    assert Path(start).is_file(), said
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    extended(out, capsys, 20, "--where", "decay=constant")
    branch = command.call(*command.tiny(f"out={tmp_path / 'new'}", f"model.start={start}", "train.steps=4"))
    assert branch.status == 0, branch.err


def test_without_a_state_it_says_so(tmp_path: Path, capsys) -> None:
    out = trained(tmp_path / "out", *GRID[:-1], "schedule.decay=constant")
    said = refused(capsys, str(out), "--steps", "20")
    number = finite(out, 6).sizes["trial"]
    assert f"no state of {number} trials is there to go on from; allowed: trials of a sweep with keep=state, or" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--steps", "5"), "--steps 5: 6 trials of more, up to 10; allowed: more steps than they have"),
        (("--steps", "0"), "--steps 0: no number of steps; allowed: 1 to"),
        (("--steps", "10"), "no trial of fewer steps that could go on"),
        (("--steps", "20", "--where", "seed=7"), "--where seed=7: no trial has it"),
        (("--steps", "20", "optim.lr=1"), "optim.lr=1: is not of the run, and which trials are trained is settled"),
        (("--steps", "20", "out=other"), "out=other: is not of the run"),
        (("--steps", "x"), "--steps"),
    ],
)
def test_wrong_input_changes_nothing(short: Path, capsys, words: tuple[str, ...], expected: str) -> None:
    before = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    if expected.startswith("--steps 5"):
        expected = expected.replace("6 trials", f"{finite(short, 10).sizes['trial']} trials")
    assert expected in refused(capsys, str(short), *words)
    assert {file: file.read_bytes() for file in short.rglob("*") if file.is_file()} == before


def test_a_plan_writes_nothing(short: Path, capsys) -> None:
    before = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    assert "packs" in extended(short, capsys, 20, "plan=true")
    assert {file: file.read_bytes() for file in short.rglob("*") if file.is_file()} == before


def test_a_damaged_state_is_named(short: Path, tmp_path: Path, capsys) -> None:
    out = copied(short, tmp_path / "out")
    file = next((out / "states").glob("*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    status, said, _ = call(capsys, "verify", str(out))
    assert status == 1 and f"damaged: {file}" in said
    assert str(file) in refused(capsys, str(out), "--steps", "20")


def test_trials_that_come_out_otherwise_are_told(short: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """As on a machine that computes otherwise: here the state was saved of other weights."""
    from harness.storage.kept_states import KeptState

    out = copied(short, tmp_path / "out")
    real = KeptState.read

    def changed(state: KeptState):
        saved = real(state)
        name = max(saved.tensors, key=lambda name: saved.tensors[name].numel() * ("weights" in name))
        saved.tensors[name].mul_(1 + 2**-10)  # what a rounded loss cannot hide on any CPU
        return saved

    monkeypatch.setattr(KeptState, "read", changed)
    status, said, _ = call(capsys, "extend", str(out), "--steps", "20", ONE)
    assert status == 1 and "6 trials differ from what they were with fewer steps, such as " in said
    assert "from step 8 on: this machine or version does not compute as the one before did" in said


# --- the states themselves ---------------------------------------------------------------------------------------


def test_states_go_with_their_trials(short: Path, tmp_path: Path, capsys) -> None:
    """Merged they come along, and a removal takes those that nobody has any more."""
    other = trained(tmp_path / "b", *GRID, "schedule.decay=wsd", "train.steps=10", "seed=1")
    into = tmp_path / "into"
    assert call(capsys, "merge", str(short), str(other), "--into", str(into))[0] == 0
    assert call(capsys, "verify", str(into))[1].endswith("every file is as it was written\n")
    names = {file.name for out in (short, other) for file in (out / "states").iterdir()}
    assert {file.name for file in (into / "states").iterdir()} == names
    assert call(capsys, "remove", str(into), "--where", "seed=1", "--yes")[0] == 0
    assert {file.name for file in (into / "states").iterdir()} == {file.name for file in (short / "states").iterdir()}
    # Of what is left of a pack a trial still goes on, from the state of the whole one.
    assert call(capsys, "remove", str(into), "--where", "mitigation=none", "--yes")[0] == 0
    said = refused(capsys, str(into), "--steps", "20")
    assert "does not say by which command it was trained" in said
    plan = json.loads((short / "plan.json").read_text())
    assert plan["words"]


def test_every_share_of_the_run_is_known() -> None:
    """A field that says it is a share of train.steps has its entry, and stays the same number in a longer run."""
    found = {
        f"{section}.{field.name.removesuffix('_share')}"
        for section, kind in sections().items()
        for field in dataclasses.fields(kind)
        if "share of train.steps" in str(field.metadata)
    }
    known = {key.replace("branch_steps", "branch") for key in SHARES}
    assert found == known, found ^ known
    for name in ("spam", "stable_spam", "adamw"):
        trial = Trial(Model(placement="branchnorm"), Optim(name=name), Schedule(decay="constant"))
        new = longer(trial, 5 * trial.train.steps)
        of_branches = module.branch_steps(new) == module.branch_steps(trial)
        assert schedules.warmup_steps(new) == schedules.warmup_steps(trial) and of_branches
        assert module.follows(trial, new) == [] and longer(new, trial.train.steps).train == trial.train
        assert goes_on_from(trial) == trial.train.steps - 1


def test_a_number_that_follows_the_length_is_noticed(monkeypatch) -> None:
    """As of an optimizer of a plug-in, of which the table knows nothing."""
    monkeypatch.delitem(SHARES, "spam.interval")
    trial = Trial(optim=Optim(name="spam"), schedule=Schedule(decay="constant"))
    assert sorted(module.follows(trial, longer(trial, 1000))) == ["grace", "interval", "warmup"]


def test_how_far_two_runs_are_one() -> None:
    constant, wsd, cosine = (Trial(schedule=Schedule(decay=decay)) for decay in ("constant", "wsd", "cosine"))
    steps = constant.train.steps
    assert shared_steps(constant, longer(constant, 2 * steps)) == steps
    assert shared_steps(wsd, longer(wsd, 2 * steps)) == goes_on_from(wsd) == round(0.8 * steps)
    assert goes_on_from(cosine) is None and shared_steps(cosine, cosine) == steps
