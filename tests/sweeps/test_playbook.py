"""`playbook=NAME` in a sweep: presets, fields, ladders, what is refused; kills, ranks, and what the store has."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import analysis
from analysis.figures.registry import Needs, Results, figures
from analysis.measures.playbooks import by_fault, cases, playbooks
from analysis.measures.verdicts import verdict_table, verdicts
from analysis.reports.playbooks import told_playbooks
from harness.config import ConfigError
from harness.config.ladder import rungs
from harness.recovery.table import ACTIONS
from harness.storage.stored import read_packs
from sweeps.commands.catalogue import entries
from sweeps.commands.tables import with_tables
from tests.sweeps import command, kills

PRESETS = [entry.name for entry in entries("playbook") if entry.name != "none"]
TEXT = (command.REPOSITORY / "docs" / "recovery.md").read_text()
LADDER = "playbook.ladder=[{detector: any, action: roll_back, limit: 3, cool_down: 5}]"
FAULT = ("fault=none,nan_gradient", "fault.start=6", "train.ranks=2", "train.batch=4", "train.steps=12")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_trained(name: str) -> None:
    needs = ["block.channel_mixer=moe"] if name == "anticipate" else []
    (trial,) = command.trials(f"playbook={name}", "train.steps=300", *needs)
    assert trial.playbook.name == name and rungs(trial.playbook.ladder)


def test_without_one_a_trial_is_what_it_was() -> None:
    assert command.trials("playbook=none")[0].id == command.trials()[0].id


def test_fields_stand_beside_a_preset_and_detectors_may_be_others() -> None:
    (trial,) = command.trials(
        "playbook=ladder", "playbook.skip_batches.count=3", "detect=finite+loss_ratio", "train.steps=9"
    )
    assert trial.section("playbook.skip_batches").count == 3 and trial.section("detect").name == "finite+loss_ratio"
    (own,) = command.trials("detect=finite", LADDER)
    assert own.playbook.name == "own" and rungs(own.playbook.ladder)[0].limit == 3


REFUSED = {
    "no such preset": (
        ["playbook=repare"],
        "playbook=repare: unknown playbook; did you mean repair? allowed: anticipate, ladder, ",
    ),
    "no such detector": (
        ["detect=finite", "playbook.ladder=[{detector: finte, action: skip}]"],
        "playbook.ladder[0].detector=finte: unknown detector; did you mean finite? allowed: any, oracle, ",
    ),
    "no such action": (
        ["detect=finite", "playbook.ladder=[{detector: any, action: skp}]"],
        "playbook.ladder[0].action=skp: unknown action; did you mean skip? allowed: anticipate, carry_on, ",
    ),
    "no such key": (
        ["detect=finite", "playbook.ladder=[{detector: any, do: skip}]"],
        "playbook.ladder[0].do=skip: unknown key; allowed: detector, action, limit, cool_down",
    ),
    "no list": (["detect=finite", "playbook.ladder=skip"], "playbook.ladder=skip: not a ladder; allowed: a list of "),
    "nothing watches": (
        ["playbook.ladder=[{detector: any, action: skip}]"],
        "playbook.ladder[0].detector=any: can never fire beside detect=none; allowed: any of oracle",
    ),
    "another watches": (
        ["playbook=olmo", "detect=finite"],
        "playbook.ladder[0].detector=skip_step: can never fire beside detect=finite; allowed: any of finite, oracle",
    ),
    "never reached": (
        ["detect=finite", "playbook.ladder=[{action: skip, limit: null}, {action: roll_back}]"],
        "playbook.ladder[1].limit: can never be reached, because those before it have limit=null; allowed: a limit ",
    ),
    "for ever": (
        ["detect=finite", "playbook.ladder=[{action: roll_back, limit: null}]"],
        "playbook.ladder[0].limit=null: roll_back goes back, and would do so for ever; allowed: 1 or more",
    ),
    "longer than the history": (
        ["playbook=llama", "playbook.roll_back.back=11"],
        "playbook.roll_back.back=11: beyond the history of playbook.snapshot.kept=2, one every 10 steps; allowed: ",
    ),
    "beyond the run": (
        ["playbook=ladder", "train.steps=100"],
        "playbook.skip_batches.count=200: the run has 100 steps; allowed: 1 to 99",
    ),
    "no field of it": (
        ["playbook=olmo", "playbook.lower_rate.factor=0.1"],
        "playbook.lower_rate.factor=0.1: reaches no trial, because playbook=olmo has no such field; allowed: ",
    ),
    "the oracle's": (
        ["detect=finite", "playbook.ladder=[{action: undo}]"],
        "playbook.ladder[0].action=undo: only the oracle knows what to undo; allowed: beside detector: oracle",
    ),
    "nothing that the oracle has seen": (
        ["detect=finite", "playbook.ladder=[{detector: oracle, action: re_execute}]"],
        "playbook.ladder[0].action=re_execute: compares what detectors have seen, and the oracle sees nothing; allowed",
    ),
    "a recipe that cannot change": (
        [
            "detect=finite",
            "playbook.ladder=[{action: change_recipe}]",
            "playbook.change_recipe.set={model.width: 3}",
        ],
        "playbook.change_recipe.set: model.width=3: fixes the shape of a pack; allowed: per-trial fields of the recipe",
    ),
    "more than memory holds": (
        ["playbook=llama", "playbook.snapshot.kept=1000", "model.width=2048", "model.head_dim=64", "out=new"],
        "playbook.snapshot.kept=1000: a pack of 1 trial needs about ",
    ),
}


@pytest.mark.parametrize("arguments, expected", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_one_line(arguments: list[str], expected: str, empty: Path) -> None:
    ended = command.call("-m", *arguments)
    assert ended.status == 2 and ended.err.count("\n") == 1, ended.err
    assert ended.err.startswith(f"error: {expected}"), ended.err
    assert not list(empty.iterdir())


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answered") / "out"
    snapshot = ["playbook.snapshot.every=2", "playbook=none,llama,oracle", "playbook.roll_back.back=0"]
    ended = command.call(*command.tiny("-m", *FAULT, "seed=range(2)", f"out={out}"), *snapshot)
    assert ended.status == 0, ended
    return out


def test_the_store_has_the_incidents(answered: Path) -> None:
    sweep = analysis.open_sweep(answered)
    faulty = sweep.where(sweep["fault"] != "none", drop=True)
    by = {name: faulty.where(faulty["playbook"] == name, drop=True) for name in ("none", "llama", "oracle")}
    assert (by["none"]["outcome"] == "non-finite").all() and (by["none"]["incidents"] == 0).all()
    for name in ("llama", "oracle"):
        assert (by[name]["outcome"] != "non-finite").all() and (by[name]["incidents"] == 1).all()
        assert (by[name]["steps_lost"] >= 1).all()
    logs = [log for pack in read_packs(answered) for log in pack.attributes["incidents"] if log]
    assert len(logs) == 4 and {act["action"] for log in logs for act in log[0]["acts"]} == {"roll_back", "undo"}
    table = analysis.incidents(answered)
    assert {"roll_back", "undo"} <= set(" ".join(table["action"].astype(str)).split())


def test_playbooks_are_compared_on_the_same_incidents(answered: Path) -> None:
    sweep = analysis.open_sweep(answered)
    table = playbooks(sweep, per_hour=3600.0).set_index("playbook")
    assert list(table["incidents"]) == [2, 2, 2] and table.loc["none", "lost"] == 2
    assert table.loc["llama", "kept"] == table.loc["oracle", "kept"] == 1 and table.loc["none", "kept"] == 0
    assert table.loc["oracle", "over_oracle"] == 1 <= table.loc["llama", "over_oracle"]
    assert (table.loc[["llama", "oracle"], "cost"] > 0).all()
    (row,) = by_fault(sweep, "llama").to_dict("records")
    counts = {"lost_without": 2, "kept": 2, "harmed": 0, "answered": 2}
    assert row == {"fault": "nan_gradient", **counts, "steps_lost": 1.0}
    assert table.loc["llama", "steps_lost_median"] == 1


def test_settings_of_a_playbook_are_compared_as_playbooks_of_their_own(tmp_path: Path) -> None:
    grid = ["playbook=none,llama,oracle", "playbook.snapshot.every=2,3", "playbook.roll_back.back=0", *FAULT]
    assert command.call(*command.tiny("-m", *grid, f"out={tmp_path / 'out'}")).status == 0
    table = playbooks(analysis.open_sweep(tmp_path / "out"))
    settings = [f"{name} (snapshot.every={every})" for name in ("llama", "oracle") for every in (2, 3)]
    assert list(table["playbook"]) == ["none", *settings] and (table["incidents"] == 1).all()
    assert (table["over_oracle"][1:] == 1).all()
    assert f"{settings[0]}, of the incidents" in "\n".join(told_playbooks(tmp_path / "out"))


def test_trials_that_only_detectors_tell_apart_are_one_without_a_playbook(tmp_path: Path) -> None:
    grid = ["detect=none,finite", "seed=range(2)", *FAULT]
    assert command.call(*command.tiny("-m", *grid, f"out={tmp_path / 'out'}")).status == 0
    assert len(cases(analysis.open_sweep(tmp_path / "out"))) == 4


def test_where_nothing_is_lost_nothing_is_kept(tmp_path: Path) -> None:
    faults = ["fault=none,learning_rate_jump", "fault.value=1.5", "fault.start=6", "train.steps=12"]
    ended = command.call(
        *command.tiny("-m", *faults, "seed=range(2)", f"out={tmp_path / 'out'}", "playbook=none,llama")
    )
    assert ended.status == 0, ended.err
    table = playbooks(analysis.open_sweep(tmp_path / "out"))
    assert (table["lost"] == 0).all() and table["kept"].isna().all()
    assert not any("by fault" in line for line in told_playbooks(tmp_path / "out"))
    assert figures(*Needs)["playbooks_compared"](Results.open(tmp_path / "out")).figure is not None


def test_the_figure_and_the_command_tell_of_them(answered: Path, tmp_path: Path) -> None:
    drawn = figures(*Needs)["playbooks_compared"](Results.open(answered))
    assert drawn.figure is not None and "2 incidents under each playbook" in drawn.caption
    assert [text.get_text() for text in drawn.figure.axes[0].get_yticklabels()] == ["llama", "oracle", "none"]
    lines = told_playbooks(answered)
    assert "llama, of the incidents that are lost without an answer, by fault:" in lines
    with pytest.raises(ConfigError, match=r"--per-hour=-1: out of range; allowed: a number from 0 on"):
        told_playbooks(answered, -1)


def test_verdicts_are_held_against_the_faults(tmp_path: Path) -> None:
    again = "playbook.ladder=[{detector: any, action: re_execute}]"
    grid = ["fault=none,nan_gradient", "fault.duration=1,null", *FAULT[1:], "detect=finite", again, "seed=range(2)"]
    ended = command.call(*command.tiny("-m", *grid, f"out={tmp_path / 'out'}", "playbook.snapshot.every=1"))
    assert ended.status == 0, ended
    table = verdict_table(verdicts(tmp_path / "out")).set_index("truth")
    assert table.loc["transient", "transient"] == table.loc["persistent", "persistent"] == 2
    assert (table["right"] == 1).all() and (table["low"] < 1).all()


@pytest.mark.parametrize(
    ("strikes", "period", "steps", "is_there"),
    [
        ((100, 1), 1, (100, 100), True),
        ((100, 1), 1, (99, 102), True),  # what was run again began before it
        ((100, 1), 1, (101, 101), False),  # it was over
        ((100, 5), 1, (104, 104), True),
        ((100, 5), 1, (105, 105), False),
        ((100, 5), 4, (101, 103), False),  # steps between two strikes
        ((100, 5), 4, (104, 110), True),
        ((100, 4), 4, (104, 110), False),  # that would be its second strike
        ((100, None), 1, (900, 900), True),
        ((100, None), 7, (101, 106), False),
    ],
)
def test_a_verdict_is_held_against_what_struck_in_the_steps_that_were_run_again(
    tmp_path: Path, strikes: tuple[int, int | None], period: int, steps: tuple[int, int], is_there: bool
) -> None:
    """An alarm after a fault that is over is one of a step that was computed as it should be."""
    start, duration = strikes
    first, last = steps
    fault = {"kind": "value", "name": "value", "start": start, "duration": duration, "period": period}
    told = [{"step": last, "action": "re_execute", "to": first}]
    told.append({"step": last, "action": "re_execute", "to": None, "detail": {"verdict": "transient"}})
    earlier = [{"step": start - 1, "action": "re_execute", "to": start - 1, "detail": {}}]
    earlier.append({"step": start - 1, "action": "re_execute", "to": None, "detail": {"verdict": "correct"}})
    logs = [[{"step": start - 1, "last": last, "alarms": 2, "acts": earlier + told}]]
    attributes = {"ids": ["one"], "golden": ["none"], "trials": [{"fault": fault}], "faults": [[]], "incidents": logs}
    pack = SimpleNamespace(complete=True, path=tmp_path, attributes=attributes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("analysis.measures.verdicts.read_packs", lambda out: [pack])
        (found,) = verdicts(tmp_path).to_dict("records")
    of_fault = "persistent" if duration is None else "transient"
    assert found["in_reach"] is is_there and found["truth"] == (of_fault if is_there else "correct")


def test_a_killed_sweep_with_rollbacks_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """SIGKILL while rows stand at different steps, on two ranks as processes; what is rolled back leaves no bit."""
    arguments = command.tiny(
        *("-m", "fault=none,nan_gradient", "fault.start=100", "train.ranks=2", "train.batch=4", "train.steps=300"),
        *("detect=finite", LADDER, "playbook.snapshot.every=25", "playbook.snapshot.kept=3", "checkpoint.every=20"),
        *("ranks=processes", "pack.size=2"),
    )

    def start(out: Path, steps: int) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        line = [sys.executable, "-m", "sweeps", *arguments, f"out={out}"]
        return subprocess.Popen(line, cwd=command.REPOSITORY, start_new_session=True, **pipes)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    printed, _ = start(whole, 0).communicate()
    assert "results in" in printed, printed
    done = kills.killed_often(killed, 3, 0, random.Random(0), at_most=0.5, start=start)
    assert done["parent"] + done["worker"] >= 1
    kills.check(killed, whole)
    sweep = analysis.open_sweep(killed)
    golden, faulty = (sweep.isel(trial=(sweep["fault"] == name).values) for name in ("none", "nan_gradient"))
    assert int(faulty["incidents"].item()) == 1 and (golden["loss"].values == faulty["loss"].values).all()


def test_a_trial_that_is_alone_can_be_saved(tmp_path: Path) -> None:
    """Of one row, what detectors remember is one number of a longer row: its bytes are not those of a view."""
    ended = command.call(
        *command.tiny("playbook=repair", "train.steps=12", "checkpoint.every=4", f"out={tmp_path / 'out'}")
    )
    assert "trained 1 of 1 trial" in ended.out and "failed" not in ended.out + ended.err


def test_the_page_has_every_playbook_and_every_action() -> None:
    assert with_tables(TEXT) == TEXT, "make tables"
    for name in ACTIONS:
        assert f"| `{name}` |" in TEXT
