"""Every command on results works on the folder of an attached run or campaign, or refuses in one line."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import analysis
from analysis.figures.registry import Needs, figures
from analysis.measures.envelope import recipes
from analysis.measures.metrics import lr_sensitivity
from analysis.pages.follower import Follower
from analysis.pages.plain import json_text
from sweeps.commands.console import run
from tests.user_loop.folders import FOLDERS

MOST_TRIALS = 1  # of a folder, of which every command on a single trial is typed
TARGETS = ("csv", "parquet", "netcdf", "tensorboard")
SHARE = 6  # figures, targets and what replays detectors take turns: each is typed for one folder in so many


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each folder, built once."""
    place = tmp_path_factory.mktemp("attached")
    for number, build in enumerate(FOLDERS.values()):
        build(place / str(number))
    return {name: place / str(number) for number, name in enumerate(FOLDERS)}


SCORED = [["detectors"], ["leaderboard"], ["lead"], [], [], []]  # each replays every detector


def on_folders(out: Path, trials: list[str], turn: int) -> Iterator[list[str]]:
    """What is typed, but for exports and figures."""
    yield from (["report", "--postmortems", "1"], ["incidents"], ["causes"])
    if SCORED[turn % SHARE]:
        yield SCORED[turn % SHARE]
    if turn % 2:  # as are its figures in the report of each
        yield ["campaign"]
    yield from (["playbooks", "--per-hour", "2"] if turn % 4 < 2 else ["playbooks"], ["provenance"])
    yield from (["status"], ["verify"], ["detectors", "finite", "detect.combined.limit=2"])
    for trial in trials[:MOST_TRIALS]:
        yield from (["postmortem", trial], ["trial", trial], ["provenance", trial[:8]])
        yield ["cross", trial, "--from", trials[-1]]
    for words in (["postmortem"], ["trial"], ["provenance"]):
        yield [*words, "0000000000000000"]


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: list[str]


def typed(words: list[str]) -> Ended:
    """The command in this process; an exception fails the test, and so does a warning of a library."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            status = run(words)
        except SystemExit as stop:
            status = stop.code
    return Ended(int(status or 0), out.getvalue(), err.getvalue().splitlines())


def check(words: list[str]) -> Ended:
    """It works, or refuses in one line that says what is allowed."""
    ended = typed(words)
    told = f"{' '.join(words)}: {ended}"
    assert ended.status in (0, 2), told
    if ended.status:
        assert ended.out == "" and len(ended.err) == 1 and ended.err[0].startswith("error: "), told
        assert "allowed: " in ended.err[0] or "No figure: " in ended.err[0], told
        assert "Error" not in ended.err[0] and "Traceback" not in ended.err[0], told
    else:
        assert ended.out and not [line for line in ended.err if not line.startswith(("note: ", "warning: clean"))], told
        assert "nan%" not in ended.out and "width nan" not in ended.out, told
    return ended


@pytest.mark.parametrize("name", FOLDERS)
def test_every_command_works_or_refuses_in_one_line(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    out = made[name]
    trials = analysis.open_sweep(out)["trial"].values.tolist()
    turn = list(FOLDERS).index(name)
    for command, *words in on_folders(out, trials, turn):
        check([command, str(out), *words])
    for figure in list(figures(*Needs))[turn % SHARE :: SHARE]:
        file = tmp_path / f"{figure}.png"
        done = check(["figure", figure, str(out), str(file)])
        assert file.exists() == (done.status == 0)
    for target in TARGETS[turn % SHARE :: SHARE]:
        assert check(["export", str(out), "--to", target, "--into", str(tmp_path / target)]).status == 0
    assert check(["export", str(out), "--to", "csv", "--incidents", "--into", str(tmp_path / "more")]).status == 0
    assert (out / "report.html").exists() and (out / "trials.html").exists()
    assert ">nan<" not in "".join((out / "report.html").read_text().split())


@pytest.mark.parametrize("name", FOLDERS)
def test_the_page_that_watches_has_every_trial(made: dict[str, Path], name: str) -> None:
    out = made[name]
    trials = analysis.open_sweep(out)["trial"].values.tolist()
    follower = Follower(out)
    follower.look()
    told = follower.news(0)
    assert told["message"] == "" and told["overview"]["trials"] == trials
    json_text(told)
    for trial in trials:
        page = follower.trial(trial)
        assert "damage" not in page["page"] and page["page"]["id"] == trial
        json_text(page)


# --- what the pages say ------------------------------------------------------------------------------------------


def test_a_strike_is_where_it_was_without_a_twin(made: dict[str, Path]) -> None:
    """A folder in which every trial has the fault has the fault's fields, as every other."""
    sweep = analysis.open_sweep(made["a fault, no twin"])
    assert sweep["fault_start"].values.tolist() == [5] and sweep["fault_kind"].values.tolist() == ["value"]
    twin = analysis.open_sweep(made["a fault and its twin"])
    fields = {str(name) for name in twin.coords if str(name).startswith("fault_")}
    assert fields == {str(name) for name in sweep.coords if str(name).startswith("fault_")}


def test_without_validation_there_is_no_sensitivity(made: dict[str, Path]) -> None:
    """It would be 0: a run without a validation loss is no run that was lost."""
    sweep = analysis.open_sweep(made["two learning rates"])
    assert lr_sensitivity(sweep)["sensitivity"].isna().all()
    (row,) = lr_sensitivity(sweep, loss="training").to_dict("records")
    assert row["sensitivity"] > 0 and row["rates"] == 2
    ended = check(["report", str(made["two learning rates"])])
    page = (made["two learning rates"] / "report.html").read_text()
    assert "LR sensitivity needs" in page and "LR sensitivity 0.00" not in page + ended.out


def test_initial_weights_are_a_seed(made: dict[str, Path]) -> None:
    """Attached runs of several seeds are one recipe: the digest of their first weights splits no group."""
    sweep = analysis.open_sweep(made["several runs"])
    assert len(set(sweep["own_start"].values)) == 2
    with pytest.warns(UserWarning, match="at least 8 finished trials with fault=last_bit; steps=12 has 0"):
        judged = analysis.rates(sweep, by=())
    assert judged["trials"].iloc[0] == 2, "of the two with a twin"
    names = recipes(sweep)[1]
    assert sorted(names) == ["steps=12", "steps=8"]


def test_time_that_was_not_measured_costs_not_nothing(made: dict[str, Path]) -> None:
    ended = check(["incidents", str(made["several runs"])])
    cost, following = ended.out.splitlines()[-2:]
    assert "in time and money not known" in cost and following.startswith("Next: stability-harness postmortem ")


def test_folders_are_what_their_names_say(made: dict[str, Path]) -> None:
    sweep = {name: analysis.open_sweep(out) for name, out in made.items()}
    masked = sweep["a campaign, all masked"]
    assert masked["masked_step"].notnull().sum() == masked.sizes["trial"] - 1 == 4
    lost = sweep["a campaign, all non-finite at once"]
    assert (lost["nonfinite_step"] == 0).sum() == lost.sizes["trial"] - 1 == 4
    assert sweep["no trial"].sizes["trial"] == 0 and set(sweep["few steps"]["steps"].values) == {1, 2, 3}
    assert (sweep["cut short"]["outcome"] == "unfinished").all()
