"""Commands on overlapping grids that run at once: each trial is trained once, and the bits are those of one command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from harness.storage.results_folder import ResultsPath
from harness.storage.store import open_store
from harness.storage.stored import read_packs
from sweeps.planning.packs import PackPlan, without
from sweeps.planning.planner import make_plan
from sweeps.running.job import Elsewhere, Finished, finished, train_pack
from sweeps.running.ledger import claimed, claims_on, lock_of
from tests.jobs import job_of
from tests.sweeps import command

COMMON = ("optim.lr=1e-2,1e-1", "fault=none,weight_bit,rare_tokens", "fault.start=20", "train.steps=40")
GRIDS = ("seed=range(0,4)", "seed=range(1,5)", "seed=range(2,6)", "seed=5,3,1,0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one command leaves for all of them."""
    folder = tmp_path_factory.mktemp("whole")
    ended = command.call(*command.tiny(*COMMON, "seed=range(6)", f"out={folder}/out"))
    assert (ended.status, ended.err) == (0, "")
    return folder / "out"


def trained(out: Path) -> list[str]:
    return sorted(trial for pack in read_packs(out) if pack.complete for trial in pack.attributes["ids"])


def test_four_commands_at_once(whole: Path, tmp_path: Path) -> None:
    """With two workers each, and packs that are cut differently."""
    options = [f"hydra.launcher.workers={1 + number % 2}" for number in range(4)]
    started = [
        command.fork(*command.tiny(*COMMON, grid, option, f"pack.size={3 + number}", "out=out"), cwd=tmp_path)
        for number, (grid, option) in enumerate(zip(GRIDS, options, strict=True))
    ]
    for process in started:
        ended = command.end(process)
        assert (ended.status, ended.err) == (0, "")
    assert trained(tmp_path / "out") == trained(whole), "each once"
    assert not command.differing(command.results(tmp_path / "out"), command.results(whole))


def test_those_that_are_killed_keep_nothing(whole: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    for number, grid in enumerate(GRIDS[:2]):
        process = command.fork(*command.tiny(*COMMON, grid, f"pack.size={3 + number}", "out=out"), cwd=tmp_path)
        begun = draw.randrange(1, 3)
        command.until(lambda count=begun: len(list(tmp_path.glob("out/store.zarr/*/loss"))) >= count, "it has begun")
        process.kill()
        command.until(lambda own=process.pid: command.is_group_gone(own), "it has ended")
    assert command.call(*command.tiny(*COMMON, "seed=range(6)", f"out={tmp_path}/out")).status == 0
    assert trained(tmp_path / "out") == trained(whole)
    assert not command.differing(command.results(tmp_path / "out"), command.results(whole))


# --- one pack --------------------------------------------------------------------------------------------------------


@pytest.fixture
def packs(tmp_path: Path) -> list[PackPlan]:
    """Packs of two grids that have two golden trials and their faults in common."""
    open_store(tmp_path, "grid")
    given = ["fault=none,weight_bit", "fault.start=3"]
    grids = [command.tiny_trials(*given, seeds) for seeds in ("seed=0,1,2", "seed=1,2,3")]
    return [pack for trials in grids for pack in make_plan(trials, (), 9, "cpu", 1).packs]


def ids(pack: PackPlan | None) -> set[str]:
    assert pack is not None
    return {trial.id for trial in pack.recorded}


def test_a_pack_is_trained_without_what_another_one_has(packs: list[PackPlan], tmp_path: Path) -> None:
    first, second = (job_of(pack, tmp_path, block=4) for pack in packs)
    assert isinstance(train_pack(first), Finished)
    assert finished(second) is None
    ended = train_pack(second)
    assert isinstance(ended, Finished) and ended.pack == second.pack.id
    assert trained(tmp_path) == sorted(ids(first.pack) | ids(second.pack)), "each once"
    again = finished(second)
    assert again is not None and len(again.outcome) == 6, "all of its trials, wherever they are"
    assert train_pack(second) == again and train_pack(first) == finished(first)


def test_what_another_process_is_training_is_left_to_it(packs: list[PackPlan], tmp_path: Path) -> None:
    folder, (first, second) = ResultsPath.open(tmp_path), packs
    with claimed(folder, first) as own:
        assert own == first
    with command.held(lock_of(folder, first.id)):
        with claimed(folder, second) as own:
            assert ids(own) == ids(second) - ids(first)
            assert own is not None and {trial.golden.id for trial in own.trials} <= {trial.id for trial in own.trials}
        with claimed(folder, first) as own:
            assert own is None
        assert train_pack(job_of(first, tmp_path, block=4)) == Elsewhere(first.id)
    with claimed(folder, second) as own:
        assert own == second, "its claim ended with it"


def test_less_of_a_pack_keeps_the_twins_and_company(packs: list[PackPlan]) -> None:
    pack = packs[0]
    golden = [trial for trial in pack.recorded if trial.golden.id == trial.id]
    faulty = [trial for trial in pack.recorded if trial.golden.id != trial.id]
    assert without(pack, set()) == pack and without(pack, ids(pack)) is None
    less = without(pack, {trial.golden.id for trial in faulty})
    assert less is not None and less.trials == pack.trials and ids(less) == {trial.id for trial in faulty}
    lone = without(pack, ids(pack) - {golden[0].id})
    assert lone is not None and ids(lone) == {golden[0].id}
    assert len(lone.trials) == 2 and lone.unstored == {golden[1].id}, "one alone has other bits"


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[" * 100_000, b"null", b'{"pack": "../x", "trials": ["a"]}', b'{"pack": 1, "trials": 2}', b"\xff"],
)
def test_a_damaged_ledger_claims_nothing(packs: list[PackPlan], tmp_path: Path, line: bytes) -> None:
    folder, (first, second) = ResultsPath.open(tmp_path), packs
    assert isinstance(train_pack(job_of(first, tmp_path, block=4)), Finished)
    ledger = tmp_path / "claims" / "ledger.jsonl"
    ledger.write_bytes(line + b"\n" + ledger.read_bytes() + line)
    with claimed(folder, second) as own:
        assert ids(own) == ids(second) - ids(first)
    assert {claim.pack for claim in claims_on(folder, ids(first))} == {first.id}
    assert json.loads(ledger.read_bytes().splitlines()[-1])["trials"] == sorted(ids(second) - ids(first))
