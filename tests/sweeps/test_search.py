"""Searches: `search=max_stable_lr`, `worst_fault` and `pareto`, alone and by several processes at once."""

from __future__ import annotations

import collections
import math
import os
import re
import signal
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from analysis.figures.largest_stable_rate import edge_table
from analysis.reading.open_sweep import open_sweep
from analysis.reading.searches import front, read_searches
from harness.storage.results_folder import ResultsPath
from harness.storage.store import open_store
from harness.storage.stored import read_packs
from sweeps.search.edge import bracket, next_rate
from sweeps.search.space import geometric
from sweeps.search.studies import DUPLICATE, Studies, journal
from tests.sweeps import command

RATES = [float(f"{10 ** (-2 + number / 3):.3g}") for number in range(12)]  # 0.01 to 46
GRID = (
    "model.width=16,32",
    "mitigation=none,qk_norm",
    "seed=range(2)",
    *("train.steps=25", "train.batch=8", "data.length=20000", "schedule.warmup=5"),
    f"optim.lr={','.join(map(str, RATES))}",
)
FAULTS = ("fault=weight_bit,moment_bit", "fault.bit=range(32)", "fault.start=interval(2,18)", "telemetry.block=50")
ONCE = ("pack.size=auto", "telemetry.block=50")


def searched(out: Path) -> list[optuna.Study]:
    storage = journal(ResultsPath.open(out) / "search")
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def points(study: optuna.Study, *states: TrialState) -> set[tuple]:
    """The parameters of the points in one of these states."""
    return {tuple(sorted(trial.params.items())) for trial in study.get_trials(states=states)}


def stored(out: Path) -> collections.Counter:
    """How often each trial is in a complete pack."""
    return collections.Counter(trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"])


# --- the largest stable rate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 2, 3])
def test_bisection_finds_every_edge(together: int) -> None:
    """With several processes at it, each of which has a rate that still runs when the next one asks."""
    for count in range(1, 40):
        rates = [1.5**number for number in range(count)]
        for edge in range(count + 1):
            stable: dict[float, bool] = {}
            while True:
                running: list[float] = []
                for _ in range(together):
                    rate = next_rate(rates, stable, running)
                    if rate is not None:
                        running.append(rate)
                if not running:
                    break
                assert len(set(running)) == len(running) and not set(running) & set(stable)
                stable |= {rate: rates.index(rate) < edge for rate in running}
            expected = (rates[edge - 1] if edge else None, rates[edge] if edge < count else None)
            assert bracket(rates, stable) == expected
            rounds = math.ceil(math.log(count + 1, together + 1) + 1e-9)
            assert len(stable) <= together * (rounds + (together > 1))


def test_what_is_stable_beyond_an_unstable_rate_does_not_count() -> None:
    rates = [1.0, 2.0, 3.0, 4.0]
    assert bracket(rates, {1.0: True, 2.0: False, 4.0: True}) == (1.0, 2.0)
    assert next_rate(rates, {1.0: True, 2.0: False, 4.0: True}, ()) is None


def test_rates_of_an_interval() -> None:
    rates = geometric(1e-3, 1.0, 1.5)
    assert rates[0] == 1e-3 and rates[-1] == 1.0
    ratios = np.divide(rates[1:], rates[:-1])
    assert ratios.min() > 1.4 and ratios.max() <= 1.5 * 1.001
    assert geometric(0.1, 0.2, 10) == [0.1, 0.2]


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 12 rates, 2 widths and 2 mitigations: as a grid, and searched."""
    folder = tmp_path_factory.mktemp("edges")
    for name, more in (("grid", ()), ("search", ("search=max_stable_lr",))):
        done = command.call(*command.tiny(*more, *GRID, *ONCE, f"out={folder}/{name}"))
        assert (done.status, done.err) == (0, ""), done
        (folder / f"{name}.txt").write_text(done.out)
    return folder


def test_the_edge_of_a_grid_at_less_than_half_of_its_cost(edges: Path) -> None:
    grid, search = (open_sweep(edges / name) for name in ("grid", "search"))
    trial_steps = [int(sweep["steps"].sum()) for sweep in (grid, search)]
    assert trial_steps[1] <= trial_steps[0] / 2
    found = [edge_table(sweep).set_index(["width", "mitigation"]) for sweep in (grid, search)]
    assert len(found[0]) == 4 and (found[0].index == found[1].index).all()
    for place, own in found[1].iterrows():
        exact, near = (RATES.index(float(table.loc[place, "stable"])) for table in found)
        assert abs(exact - near) <= 1, place
        assert RATES.index(own["unstable"]) == near + 1 and own["seeds"] == 2
    assert len({float(value) for value in found[0]["stable"]} & {RATES[0], RATES[-1]}) == 0, "edges inside the grid"


def test_its_trials_are_those_of_the_grid(edges: Path) -> None:
    """The same ids, so that a grid in the same folder trains the others alone."""
    grid, search = (stored(edges / name) for name in ("grid", "search"))
    assert set(search) < set(grid) and set(search.values()) == {1}
    more = command.call(*command.tiny(*GRID, "plan=true", f"out={edges}/search"))
    assert f"{len(search)} complete already: {len(grid) - len(search)} to train" in more.out


def test_what_it_says_and_that_it_goes_on_where_it_was(edges: Path) -> None:
    printed = (edges / "search.txt").read_text()
    table = edge_table(open_sweep(edges / "search"))
    for _, row in table.iterrows():
        line = f"model.width={row['width']:.0f} mitigation={row['mitigation']}: largest stable optim.lr "
        assert f"{line}{row['stable']:.4g}, {row['unstable']:.4g} is not ({row['rates']} of 12 rates" in printed
    lines = [line for line in printed.splitlines() if not re.match(r"\d+/\d+ trials, ", line)]  # of a slow round
    rounds = len(lines) - 2 - 1 - len(table) - 1
    assert rounds > 1 and lines[-1] == f"results in {edges}/search"
    for number, line in enumerate(lines[2:][:rounds], start=1):
        assert re.match(rf"round {number}, \d+ points?: trained (\d+) of \1 trials: \d+ ", line), line
    before = command.tree(edges / "search" / "store.zarr")
    arguments = command.tiny("search=max_stable_lr", *GRID, *ONCE, f"out={edges}/search")
    again = command.call(*arguments)
    assert again.status == 0 and printed.endswith(again.out)
    assert command.tree(edges / "search" / "store.zarr") == before


# --- the worst fault -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes, which start at the same time, search for single bits that break a run."""
    out = tmp_path_factory.mktemp("faults") / "out"
    sizes = ("train.steps=20", "search.trials=36", "search.batch=12", "pack.size=auto")
    arguments = command.tiny("search=worst_fault", *FAULTS, *sizes, f"out={out}")
    processes = [command.fork(*arguments, cwd=out.parent) for _ in range(2)]
    ended = [command.end(process) for process in processes]
    assert [one.status for one in ended] == [0, 0], ended
    assert {one.out.splitlines()[-1] for one in ended if "broke" in one.out}, ended
    return out


def test_a_single_bit_that_breaks_the_run(faults: Path) -> None:
    (history,) = read_searches(faults)
    tried = history.points
    assert len(tried) <= 36 and tried["is_good"].any()
    sweep = open_sweep(faults)
    lost = sweep.isel(trial=np.isin(sweep["outcome"], ("non-finite", "divergent")))
    assert (lost["fault"] != "none").all() and lost.sizes["trial"] >= tried["is_good"].sum()
    assert tried.loc[tried["is_good"], "objective 1"].min() > 0.1
    assert (tried["objective 0"].between(-45, 39)).all()


def test_two_processes_share_it_and_repeat_nothing(faults: Path) -> None:
    (study,) = searched(faults)
    told = [trial for trial in study.trials if trial.state == TrialState.COMPLETE and DUPLICATE not in trial.user_attrs]
    ids = [trial.user_attrs["ids"][0] for trial in told]
    assert len(set(ids)) == len(ids) <= 36
    assert len({trial.user_attrs["owner"] for trial in told}) == 2, "both took part"
    assert set(stored(faults).values()) == {1} and set(ids) < set(stored(faults))
    assert not study.get_trials(states=[TrialState.RUNNING, TrialState.WAITING])


def test_the_damage_and_the_size_are_what_the_store_says(faults: Path) -> None:
    """Recomputed from the losses and from the bits before and after."""
    (study,) = searched(faults)
    sweep = open_sweep(faults).compute()
    place = {str(trial): row for row, trial in enumerate(sweep["trial"].values)}
    events = {
        trial: own
        for pack in read_packs(faults)
        for trial, own in zip(pack.attributes["ids"], pack.attributes["faults"], strict=True)
    }
    for trial in study.get_trials(states=[TrialState.COMPLETE]):
        if DUPLICATE in trial.user_attrs:
            continue
        (own,) = trial.user_attrs["ids"]
        (event,) = events[own]
        before, after = (np.uint32(int(event[f"bits_{when}"], 16)).view(np.float32) for when in ("before", "after"))
        size = abs(float(after) - float(before))
        expected = math.log10(min(max(size, 1e-45), 3.5e38)) if math.isfinite(size) else math.log10(3.5e38)
        assert trial.values[0] == pytest.approx(expected, abs=1e-5)
        loss, golden = (
            sweep["loss"].values[place[row]] for row in (own, str(sweep["golden"].values[place[own]]))
        )  # fmt: skip
        if trial.user_attrs["outcomes"] == ["non-finite"]:
            assert trial.values[1] == pytest.approx(math.log(32))
        else:
            # The last 5 steps, but from the strike on.
            begin = max(15, event["step"])
            drift = abs((loss - golden)[begin:].astype(float).mean())
            assert trial.values[1] == pytest.approx(min(drift, math.log(32)), abs=1e-6)


# --- final loss against worst deviation ----------------------------------------------------------------------------


def test_the_front_of_loss_against_worst_deviation(tmp_path: Path) -> None:
    arguments = command.tiny(
        *("search=pareto", "fault=weight_bit,nan_gradient", "fault.start=8", "seed=range(2)", "train.steps=20"),
        *("mitigation=none,z_loss", "optim.clip=tag(log,interval(0.1,10))", "search.trials=24", *ONCE),
    )
    done = command.call(*arguments, f"out={tmp_path}/out")
    assert (done.status, done.err) == (0, ""), done
    (history,) = read_searches(tmp_path / "out")
    tried = history.points
    assert len(tried) == 24 // 4 and set(tried["param mitigation"]) == {"none", "z_loss"}
    assert tried["param optim.clip"].between(0.1, 10).all()
    sweep = open_sweep(tmp_path / "out")
    assert sweep.sizes["trial"] == len(tried) * 2 * 3 and bool(sweep["complete"].all())
    best = front(tried, history.directions)
    values = tried[["objective 0", "objective 1"]].to_numpy()
    for own in values:
        beaten = (values <= own).all(axis=1) & (values < own).any(axis=1)
        assert beaten.any() != bool((best[["objective 0", "objective 1"]].to_numpy() == own).all(axis=1).any())
    assert "front of" in done.out and "mitigation=" in done.out.splitlines()[-2]


# --- stops and damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max_stable_lr", "worst_fault"])
def test_killed_searches_go_on(tmp_path: Path, kind: str) -> None:
    """By SIGKILL in the middle of a round, of all processes. Nothing is lost, nothing trained twice."""
    few = ("optim.lr=0.1,1.0,10.0", "mitigation=none,qk_norm", "seed=range(3)", "train.batch=8", "data.length=20000")
    own = few if kind == "max_stable_lr" else (*FAULTS[:-1], "search.trials=24", "search.batch=12")
    line = (f"search={kind}", *own, "train.steps=60", "checkpoint.every=10", *ONCE)
    arguments, two_workers = command.tiny(*line), command.tiny(*line, "hydra.launcher.workers=2")
    process = command.fork(*two_workers, f"out={tmp_path}/out", cwd=tmp_path)
    command.until(lambda: list(tmp_path.glob("out/checkpoints/*/*.safetensors")), "a checkpoint")
    os.killpg(process.pid, signal.SIGKILL)
    command.end(process)
    command.until(lambda: command.is_group_gone(process.pid), "all processes end")
    asked = {study.study_name: points(study, TrialState.RUNNING) for study in searched(tmp_path / "out")}
    assert any(asked.values()) or kind == "worst_fault", "it was in the midst of a round (or of the golden twins)"
    again = command.end(command.fork(*arguments, f"out={tmp_path}/out", cwd=tmp_path))
    assert (again.status, again.err) == (0, ""), again
    assert set(stored(tmp_path / "out").values()) == {1}
    for study in searched(tmp_path / "out"):
        assert not points(study, TrialState.RUNNING, TrialState.WAITING)
        assert asked.get(study.study_name, set()) <= points(study, TrialState.COMPLETE)
    if kind == "max_stable_lr":
        alone = command.call(*arguments, f"out={tmp_path}/alone")
        assert alone.out.splitlines()[-3:-1] == again.out.splitlines()[-3:-1]
        assert set(stored(tmp_path / "out")) == set(stored(tmp_path / "alone"))


def test_points_that_cannot_be_are_told_as_such_and_count(tmp_path: Path) -> None:
    """An element that one of the tensors does not have: seen only where the two come together."""
    own = ("fault=weight_bit", "fault.tensor=head,blocks.0.attention.query", "fault.element=interval(0,500)")
    sizes = ("fault.start=3", "search.trials=30", "search.batch=10", *ONCE)
    done = command.call(*command.tiny("search=worst_fault", *own, *sizes, f"out={tmp_path}/out"))
    assert (done.status, done.err) == (0, ""), done
    (study,) = searched(tmp_path / "out")
    failed = [trial for trial in study.get_trials(states=[TrialState.FAIL]) if DUPLICATE not in trial.user_attrs]
    assert failed and all("beyond fault.tensor=blocks.0" in trial.user_attrs["reason"] for trial in failed)
    assert len(failed) + len(points(study, TrialState.COMPLETE)) == 30


def test_a_golden_twin_that_is_lost_ends_the_search(tmp_path: Path) -> None:
    arguments = command.tiny("search=worst_fault", "fault=weight_bit", "fault.bit=range(32)", "fault.start=3", *ONCE)
    blown = ("optim.name=sgd", "optim.lr=1e30", "optim.clip=null")
    done = command.call(*arguments, *blown, f"out={tmp_path}/out")
    assert done.status == 2 and done.err.startswith("error: optim.lr=1e+30: without a fault it became non-finite")
    assert sum(stored(tmp_path / "out").values()) == 1


def test_a_half_written_last_line_is_cut_off(tmp_path: Path) -> None:
    folder = open_store(tmp_path, "grid")
    studies = Studies(folder)
    with studies.open():
        studies.study("a", ["maximize"], {})
    file = tmp_path / "search" / "journal.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":0,"worker')
    with Studies(folder).open() as again:
        again.study("b", ["maximize"], {})
    assert file.read_bytes().startswith(whole)
    assert [study.study_name for study in searched(tmp_path)] == ["a", "b"]


def test_a_plan_writes_nothing(empty: Path) -> None:
    planned = command.call(*command.tiny("search=max_stable_lr", *GRID, "plan=true"))
    assert planned.status == 0 and "search=max_stable_lr of optim.lr in 4 cells" in planned.out
    assert "8 trials asked for" in planned.out and not any(empty.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search=nope"], "search=nope: unknown search; did you mean none? allowed: max_stable_lr, none, pareto"),
        (["search=pareto,worst_fault"], "search=pareto,worst_fault: belongs to the run and cannot be swept"),
        (["search.kind=best"], "search.kind=best: out of range; allowed: none, max_stable_lr, worst_fault, pareto"),
        (["search=max_stable_lr", "search.trials=0"], "search.trials=0: out of range; allowed: >= 1"),
        (["search=max_stable_lr", "search.tolerance=1"], "search.tolerance=1.0: out of range; allowed: >= 1.001"),
        (["optim.lr=interval(1,2)"], "optim.lr=interval(1,2): an interval has no grid; allowed: values with commas"),
        (["search=max_stable_lr", "optim.lr=interval(2,1)"], "optim.lr=interval(2,1): an empty interval"),
        (["search=max_stable_lr", "optim.lr=tag(log,interval(0,1))"], "no logarithm at 0"),
        (["search=max_stable_lr", "optim.lr=tag(lin,interval(1,2))"], "unknown tag lin; allowed: log"),
        (["search=max_stable_lr", "optim.lr=0.1"], "search=max_stable_lr: nothing to search; allowed: several values"),
        (
            ["search=max_stable_lr", "optim.weight_decay=interval(0,1)"],
            "optim.weight_decay=interval(0,1): search=max_stable_lr searches optim.lr; allowed here: values",
        ),
        (["search=max_stable_lr", "mitigation=interval(1,2)"], "mitigation=interval(1,2): names have no interval"),
        (
            ["search=max_stable_lr", "optim.lr=interval(0.1,x)"],
            "optim.lr=interval(0.1,x): interval() cannot be read so; allowed: interval(low, high)",
        ),
        (
            ["search=worst_fault"],
            "search=worst_fault: nothing to search; allowed: several values, or an interval, of fa",
        ),
        (["search=worst_fault", "fault=weight_bit,none", "fault.start=3"], "fault=none: has no size"),
        (
            ["search=worst_fault", "fault=rare_tokens", "fault.start=interval(1,4)"],
            "search.size=null: of fault=rare_tokens no values are recorded before and after",
        ),
        (
            ["search=worst_fault", "fault=weight_bit", "fault.start=interval(1,4)", "search.size=bit"],
            "search.size=bit: no field of a fault; allowed: fault.NAME, or null",
        ),
        (
            ["search=worst_fault", "fault=weight_bit", "fault.start=3", "fault.bit=interval(0,40)"],
            "fault.bit=40: beyond fault.format=fp32; allowed: 0 to 31",
        ),
        (
            ["search=worst_fault", "fault=weight_bit", "fault.start=3", "fault.bit=1,2", "fault.samples=4"],
            "fault.samples=4: a search draws its own faults; allowed: null",
        ),
        (
            ["search=max_stable_lr", "data.source=text", "data.path=nowhere", "data.vocabulary=256"],
            "data.path=nowhere: ",
        ),
        (["search=pareto", "mitigation=none,qk_norm"], "fault=none: no deviation without a fault"),
    ],
)
def test_bad_input(empty: Path, arguments: list[str], message: str) -> None:
    ended = command.call(*command.tiny(*arguments))
    assert ended.status == 2 and message in ended.err, ended.err
    assert "Traceback" not in ended.err and not any(empty.iterdir())
