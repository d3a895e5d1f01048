"""Plans hold for random grids what packs must: every trial once, every faulty one beside its golden twin."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.config import Model, Optim, Train, Trial
from harness.training.pack_sizes import cut, rows_at_once
from injectors.batch import RareTokens
from injectors.value import Value
from sweeps.planning.packs import PackPlan, Plan
from sweeps.planning.planner import (
    MOST_ALIKE,
    make_plan,
    mean_rows,
    pack_bytes,
    pack_seconds,
    trials_that_fit,
    wall_seconds,
)
from sweeps.running.local import SHARE_OF_MEMORY
from sweeps.slurm.executor import SlurmExecutor
from tests.sweeps import command

SEEDS = range(60)


def random_trials(draw: random.Random) -> list[Trial]:
    """Trials of some shapes, with and without faults, some of whose golden twins are among them."""
    trials = []
    for width in draw.sample([16, 32, 64], draw.randint(1, 3)):
        for seed in range(draw.randint(1, 12)):
            lr = draw.choice([0.1, 0.2])
            golden = Trial(Model(width=width), Optim(lr=lr), train=Train(steps=draw.choice([50, 50, 90])), seed=seed)
            faults = [Value(bit=bit, start=5) for bit in range(draw.choice([0, 0, 1, 2, 7, 30]))]
            faults += [RareTokens(start=9)] * draw.randint(0, 1)
            family = [dataclasses.replace(golden, fault=fault) for fault in faults]
            trials += family + ([golden] if draw.random() < 0.5 or not family else [])
    draw.shuffle(trials)
    return trials


@cache
def random_plan(seed: int) -> tuple[list[Trial], set[str], int | None, Plan]:
    """(trials asked for, ids complete already, pack size, plan)."""
    draw = random.Random(seed)
    trials = random_trials(draw)
    everything = {t.id for t in trials} | {t.golden.id for t in trials}
    share = draw.choice([0, 0, 0.3, 0.9])
    complete = {trial for trial in sorted(everything) if draw.random() < share}
    size = draw.choice([None, draw.randint(1, 9)])
    return trials, complete, size, make_plan(trials, complete, size, "cpu", workers=draw.randint(1, 4))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_trial_once(seed: int) -> None:
    """Recorded: all that was asked for and all golden twins, less what is complete, each exactly once."""
    trials, complete, _, plan = random_plan(seed)
    recorded = Counter(trial.id for pack in plan.packs for trial in pack.recorded)
    wanted = {t.id for t in trials}
    twins = {t.golden.id for t in trials}
    assert recorded == Counter((wanted | twins) - complete)
    assert plan.asked == len(wanted)
    assert plan.added_twins == len(twins - wanted)
    assert plan.complete == len((wanted | twins) & complete)
    assert plan.trials == recorded.total()


@pytest.mark.parametrize("seed", SEEDS)
def test_packs(seed: int) -> None:
    _, complete, size, plan = random_plan(seed)
    lone = Counter()
    shapes = Counter(pack.trials[0].structure for pack in plan.packs)
    for pack in plan.packs:
        inside = {trial.id for trial in pack.trials}
        assert len(inside) == len(pack.trials)  # none twice
        assert {trial.golden.id for trial in pack.trials} <= inside  # each beside its twin
        assert len({trial.structure for trial in pack.trials}) == 1
        assert len(pack.trials) <= (size or MOST_ALIKE) + 1
        assert not {trial.id for trial in pack.recorded} & pack.unstored
        needed = {trial.golden.id for trial in pack.recorded if trial.golden != trial}
        # No unstored twin without a trial that needs it, or to keep company.
        assert pack.unstored <= needed or (len(pack.trials), len(pack.recorded)) == (2, 1)
        assert pack.recorded
        assert not complete & {trial.id for trial in pack.recorded}
        lone[pack.trials[0].structure] += len(pack.trials) == 1
    if size != 1:
        # A pack of one has other bits than a larger one, so only a trial without any companion is alone.
        assert all(shapes[structure] == 1 for structure, count in lone.items() if count)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_finished_plan_leaves_nothing(seed: int) -> None:
    trials, complete, size, plan = random_plan(seed)
    done = complete | {trial.id for pack in plan.packs for trial in pack.recorded}
    again = make_plan(trials, done, size, "cpu", workers=2)
    assert (again.packs, again.trials) == ((), 0)
    assert again.complete == len({t.id for t in trials} | {t.golden.id for t in trials})


@pytest.mark.parametrize("seed", range(20))
def test_an_interrupted_plan_goes_on(seed: int) -> None:
    """Whichever packs ended, the rest and nothing else is planned again."""
    trials, complete, size, plan = random_plan(seed)
    ended = random.Random(seed).sample(plan.packs, len(plan.packs) // 2)
    done = complete | {trial.id for pack in ended for trial in pack.recorded}
    rest = make_plan(trials, done, size, "cpu", workers=2)
    assert {t.id for pack in rest.packs for t in pack.recorded} == {
        t.id for pack in plan.packs for t in pack.recorded
    } - done


def test_families_stay_whole_where_they_fit() -> None:
    """Golden trial and its faulty ones are trained once, together: no unstored twin is needed."""
    trials = [dataclasses.replace(Trial(seed=seed), fault=Value(bit=bit)) for seed in range(12) for bit in range(3)]
    plan = make_plan(trials, (), 8, "cpu", workers=2)
    assert not any(pack.unstored for pack in plan.packs)
    assert [len(pack.trials) for pack in plan.packs] == [8] * 6


def test_later_faults_bring_unstored_twins() -> None:
    """A golden trial that is stored already is trained again beside new faults, and not recorded again."""
    golden = [Trial(seed=seed) for seed in range(4)]
    faulty = [dataclasses.replace(trial, fault=Value(bit=3)) for trial in golden]
    plan = make_plan(faulty, {trial.id for trial in golden}, 4, "cpu", workers=1)
    assert [len(pack.trials) for pack in plan.packs] == [4, 4]
    assert {trial.id for pack in plan.packs for trial in pack.recorded} == {trial.id for trial in faulty}
    assert set.union(*(set(pack.unstored) for pack in plan.packs)) == {trial.id for trial in golden}


def test_a_fault_shared_by_many_has_one_twin() -> None:
    trials = [dataclasses.replace(Trial(), fault=Value(bit=bit)) for bit in range(7)]
    plan = make_plan(trials, (), 8, "cpu", workers=1)
    (pack,) = plan.packs
    assert (plan.asked, plan.added_twins, len(pack.trials)) == (7, 1, 8)


def test_largest_packs_first() -> None:
    trials = [Trial(Model(width=width), seed=seed) for width in (32, 128, 64) for seed in range(6)]
    plan = make_plan(trials, (), None, "cpu", workers=2)
    seconds = [pack_seconds(pack, "cpu") for pack in plan.packs]
    assert seconds == sorted(seconds, reverse=True)
    assert wall_seconds(plan, "cpu", 1) == pytest.approx(sum(seconds))
    assert max(seconds) <= wall_seconds(plan, "cpu", 2) < sum(seconds)


def packs_of(trials: Sequence[Trial], complete: Iterable[str] = ()) -> list[tuple[str, ...]]:
    """The recorded trials of each pack, in some order."""
    plan = make_plan(trials, complete, 4, "cpu", workers=2)
    return sorted(tuple(trial.id for trial in pack.recorded) for pack in plan.packs)


def test_what_is_complete_regroups_nothing_else() -> None:
    """So a command that is started again finds its own checkpoints, and one that runs beside it the same packs."""
    golden = [Trial(Model(width=32), seed=seed) for seed in range(10)]
    trials = [*golden, *(dataclasses.replace(trial, fault=Value(bit=bit)) for trial in golden[:4] for bit in (1, 2))]
    everything = packs_of(trials)
    for done in everything:
        assert packs_of(trials, done) == [pack for pack in everything if pack != done]
    part = everything[0][:1]
    again = packs_of(trials, part)
    assert all(pack in again for pack in everything[1:])
    assert sorted(id for pack in again for id in pack) == sorted({trial.id for trial in trials} - {*part})


def test_a_trial_that_is_left_alone_trains_beside_one_that_is_stored() -> None:
    trials = [Trial(Model(width=32), seed=seed) for seed in range(4)]
    (pack,) = make_plan(trials, [trial.id for trial in trials[:3]], 4, "cpu", workers=1).packs
    assert pack.recorded == (trials[3],) and len(pack.trials) == 2 and pack.unstored <= {t.id for t in trials[:3]}


def test_structures_of_about_one_length_take_turns() -> None:
    """So that what slows the machine down for a while is not put down to one mitigation."""
    trials = [Trial(Model(width=64, qk_norm=norm), seed=seed) for norm in (False, True) for seed in range(12)]
    trials += [Trial(Model(width=64, activation="relu"), seed=seed) for seed in range(8)]
    plan = make_plan(trials, (), 4, "cpu", workers=2)
    kinds = [(pack.trials[0].model.qk_norm, pack.trials[0].model.activation) for pack in plan.packs]
    assert len(kinds) == 8
    for begin in (0, 3, 6):
        turn = kinds[begin : begin + 3]
        assert len(set(turn)) == len(turn)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_auto_size_keeps_all_workers_busy(device: str, workers: int) -> None:
    trials = [Trial(Model(width=32), seed=seed) for seed in range(10)]
    plan = make_plan(trials, (), None, device, workers)
    assert len(plan.packs) >= min(workers, 5)
    assert min(len(pack.trials) for pack in plan.packs) >= 2


def test_pack_ids_name_what_is_recorded() -> None:
    golden, faulty = Trial(), dataclasses.replace(Trial(), fault=Value())
    (first,) = make_plan([golden, faulty], (), 4, "cpu", 1).packs
    (same,) = make_plan([golden, faulty], (), 4, "cpu", 2).packs
    (later,) = make_plan([golden, faulty], {golden.id}, 4, "cpu", 1).packs
    assert first.id == same.id != later.id


# --- many faults of one golden trial -----------------------------------------------------------------------------

LONG = Trial(Model(width=32), train=Train(steps=100))


def family(golden: Trial, count: int, start: int) -> list[Trial]:
    """Faulty trials that begin at this step or, every other one, at the next."""
    return [dataclasses.replace(golden, fault=Value(element=i, bit=3, start=start + i % 2)) for i in range(count)]


def assert_each_once(plan: Plan, trials: list[Trial]) -> None:
    """Each trial and golden twin is recorded once, faulty ones beside their twin, which no pack has twice."""
    recorded = Counter(trial.id for pack in plan.packs for trial in pack.recorded)
    assert recorded == Counter({t.id for t in trials} | {t.golden.id for t in trials})
    for pack in plan.packs:
        inside = Counter(trial.id for trial in pack.trials)
        assert set(inside.values()) == {1} and {trial.golden.id for trial in pack.trials} <= set(inside)


def rows_that_are_fastest(trial: Trial) -> int:
    return rows_at_once(trial.model, trial.train.batch // trial.train.ranks, torch.device("cpu"))


@pytest.mark.parametrize(("faults", "packs"), [(MOST_ALIKE - 1, 1), (MOST_ALIKE, 2), (200, 4)])
def test_many_faults_share_a_prefix_up_to_a_limit(faults: int, packs: int) -> None:
    """So early that more than one pack would hold them all; the prefix is trained once a pack."""
    trials = family(LONG, faults, start=20)
    plan = make_plan(trials, (), None, "cpu", workers=1)
    sizes = [len(pack.trials) for pack in plan.packs]
    assert len(sizes) == packs and max(sizes) <= MOST_ALIKE and max(sizes) - min(sizes) <= 1
    assert_each_once(plan, trials)
    assert sum(LONG.id in pack.unstored for pack in plan.packs) == packs - 1


@pytest.mark.parametrize("memory", [math.inf, 64e9])
@pytest.mark.parametrize("start", [0, 20, 50])
def test_as_many_faults_as_stay_together_leave_no_slot_of_an_accelerator_idle(start: int, memory: float) -> None:
    """With their golden twin they are as many rows as pass through a small model together."""
    trials = family(LONG, MOST_ALIKE - 1, start)
    (pack,) = make_plan(trials, (), None, "cuda", 1, memory).packs
    assert len(pack.trials) == MOST_ALIKE == cut(len(pack.trials), MOST_ALIKE, torch.device("cuda"))[-1].stop
    assert len(cut(MOST_ALIKE, MOST_ALIKE, torch.device("cuda"))) == 1
    assert cut(MOST_ALIKE + 1, MOST_ALIKE, torch.device("cuda"))[-1].stop > MOST_ALIKE + 1, "one more would"


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_many_faults_are_shared_out_over_the_workers(workers: int) -> None:
    trials = family(LONG, 50, start=20)
    plan = make_plan(trials, (), None, "cpu", workers)
    sizes = [len(pack.trials) for pack in plan.packs]
    assert len(sizes) == workers and max(sizes) - min(sizes) <= 1
    assert_each_once(plan, trials)


@pytest.mark.parametrize("fitting", [3, 5, 20, 50])
def test_many_faults_are_cut_by_memory(fitting: int) -> None:
    """A pack whose state would not fit is none, however late the faults of its families begin."""
    trials = [trial for seed in range(4) for trial in family(dataclasses.replace(LONG, seed=seed), 45, start=98)]
    memory = pack_bytes(PackPlan((LONG,) * fitting, frozenset()))
    assert trials_that_fit(LONG, memory, "cpu") == fitting
    plan = make_plan(trials, (), None, "cpu", 1, memory)
    assert all(pack_bytes(pack) <= memory for pack in plan.packs)
    assert sum(len(pack.trials) for pack in plan.packs) >= 0.6 * fitting * len(plan.packs)  # and not by more than that
    assert_each_once(plan, trials)


@pytest.mark.parametrize("seed", SEEDS)
def test_packs_fit_into_memory(seed: int) -> None:
    """Where two trials do, which are the smallest pack."""
    draw = random.Random(seed)
    trials = random_trials(draw)
    trials += family(LONG, draw.choice([0, 3, 70]), start=draw.choice([5, 50, 98]))
    memory = draw.uniform(1.5, 12) * max(pack_bytes(PackPlan((trial,), frozenset())) for trial in trials)
    plan = make_plan(trials, (), None, "cpu", draw.randint(1, 4), memory)
    assert_each_once(plan, trials)
    for pack in plan.packs:
        most = trials_that_fit(pack.trials[0], memory, "cpu")
        assert pack_bytes(pack) <= memory or most == len(pack.trials) == 2


@pytest.mark.parametrize("number", [2, 3, 15])
def test_no_third_trial_joins_where_there_is_room_for_two(number: int) -> None:
    """The odd one out trains beside another one, which is recorded in its own pack."""
    trials = [dataclasses.replace(LONG, seed=seed) for seed in range(number)]
    memory = pack_bytes(PackPlan((LONG, LONG), frozenset()))
    plan = make_plan(trials, (), None, "cpu", 1, memory)
    assert all(len(pack.trials) == 2 and pack_bytes(pack) <= memory for pack in plan.packs)
    assert sum(len(pack.unstored) for pack in plan.packs) == number % 2
    assert_each_once(plan, trials)


def test_late_faults_fill_packs_by_the_rows_that_they_need() -> None:
    """Several pieces of a family land in one pack, which has their golden trial once."""
    trials = family(LONG, 400, start=98)
    plan = make_plan(trials, (), None, "cpu", workers=1)
    assert max(len(pack.trials) for pack in plan.packs) > MOST_ALIKE
    assert len(plan.packs) < 400 / MOST_ALIKE
    assert max(mean_rows(pack.trials) for pack in plan.packs) <= rows_that_are_fastest(LONG)
    assert_each_once(plan, trials)
    assert sum(trial == LONG for pack in plan.packs for trial in pack.trials) == len(plan.packs)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mixed_sweep_keeps_packs_of_the_size_that_is_fastest(workers: int) -> None:
    """Goldens alone, small families and large ones: rows in training at a time, on average over the run."""
    goldens = [dataclasses.replace(LONG, seed=seed) for seed in range(1, 41)]
    trials = goldens + family(LONG, 150, start=95) + [t for g in goldens[:10] for t in family(g, 3, start=60)]
    plan = make_plan(trials, (), None, "cpu", workers)
    assert_each_once(plan, trials)
    best, rows = rows_that_are_fastest(LONG), [mean_rows(pack.trials) for pack in plan.packs]
    assert max(rows) <= best and sum(rows) / len(rows) > 0.7 * best


def test_mean_rows() -> None:
    """A golden trial needs one from the first step on, a faulty one from its strike on."""
    early, late = (dataclasses.replace(LONG, fault=Value(start=start)) for start in (0, 70))
    assert mean_rows([LONG]) == mean_rows([early]) == 1
    assert mean_rows([LONG, early, late]) == pytest.approx(2.3)
    assert mean_rows([dataclasses.replace(LONG, fault=Value(start=100))]) == 0


@pytest.mark.parametrize(
    ("memory", "megabytes"),
    [("4GB", 4096), ("500M", 500), ("2000", 2000), (2000, 2000), ("1.5T", 1.5 * 2**20), ("64kb", 1 / 16)],
)
def test_memory_of_a_job(memory: str | int, megabytes: float) -> None:
    """As sbatch reads it; packs get their share of it, and on a GPU it says nothing."""
    executor = SlurmExecutor({"memory": memory}, wait=True)
    assert executor.memory("cpu") == SHARE_OF_MEMORY * megabytes * 2**20
    assert executor.memory("cuda") == math.inf


@pytest.mark.parametrize("memory", ["0", 0, "plenty"])
def test_memory_that_is_not_known(memory: str | int) -> None:
    assert SlurmExecutor({"memory": memory}, wait=True).memory("cpu") == math.inf


# --- ten thousand trials -----------------------------------------------------------------------------------------


def calls_of(work: Callable[[], object]) -> int:
    """Function calls that `work` makes: its cost, the same on every machine."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_planning_grows_linearly() -> None:
    """Ten times the trials may take ten times the calls, and a little: from overrides to packs."""

    def plan(seeds: int) -> None:
        axes = [f"seed=range({seeds})", "optim.lr=0.1,0.2", "mitigation=none,mup", "fault=none,weight_bit"]
        trials = command.trials(*axes, "model.width=16,32")
        assert len(make_plan(trials, (), 5, "cpu", 2).packs) == 4 * -(-seeds * 4 // 4)

    plan(30)  # what is cached for good is cached now
    few, many = calls_of(lambda: plan(30)), calls_of(lambda: plan(300))
    assert many < 10.5 * few


def test_ten_thousand_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs, memory included, is measured by tests/benchmarks/planning.py."""
    monkeypatch.chdir(tmp_path)
    rates = ",".join(f"{10 ** (-4 + 3 * i / 19):.5g}" for i in range(20))
    ended = command.call("plan=true", "seed=range(250)", f"optim.lr={rates}", "fault=none,weight_bit", "out=out")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("10000 trials asked for, 0 golden twins added, 0 complete already: 10000 to train in ")
    assert not any(tmp_path.iterdir())
