"""`ranks=processes`: the same command, the same store; ranks that are killed, that fail, and that go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from analysis import fault_events
from harness.storage.checkpoint import Checkpoints, Stopped
from harness.storage.store import open_store
from harness.storage.stored import read_packs
from harness.testing.engine import Dying, Killed
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import make_plan
from sweeps.running.job import Finished, Job, train_pack
from sweeps.running.local import LocalExecutor
from sweeps.running.processes import RankFailed, RankKilled, ranks, share_of_threads
from tests.jobs import job_of
from tests.sweeps import command, kills
from tests.sweeps.forks import Forked
from tests.sweeps.rank_work import dies_at_once, exchange, fails

CPU = torch.device("cpu")
FAULTS = "fault=none,activation_bit,stale_gradient,dropped_rank,realistic_sdc"
GRID = ("seed=range(2)", FAULTS, "fault.start=6", "fault.rank=1", "train.ranks=2", "train.batch=4", "train.steps=12")
LONG = ("train.ranks=2", "train.steps=100000", "pack.size=2", "telemetry.block=20", "ranks=processes")


def test_the_same_command_leaves_the_same_store(empty: Path) -> None:
    arguments = command.tiny("-m", *GRID, "pack.size=12")
    for more in (["out=simulated"], ["out=processes", "ranks=processes"]):
        ended = command.call(*arguments, *more)
        assert (ended.status, ended.err) == (0, ""), ended
    kills.check(empty / "processes", empty / "simulated")
    left, right = (fault_events(folder) for folder in ("processes", "simulated"))
    assert left.drop(columns="pack").equals(right.drop(columns="pack")) and set(left["rank"]) == {0, 1}
    environments = [pack.attributes["environment"] for pack in read_packs(empty / "processes")]
    assert [(own["processes"], own["threads"]) for own in environments] == [(2, 1)]
    again = command.call(*arguments, "out=simulated", "ranks=processes")
    assert "0 to train in 0 packs" in again.out, "a key of the run, not of the trial"


def test_packs_of_one_rank_train_as_before(empty: Path) -> None:
    """In workers of a pool, which may have no children of their own; packs without ranks are in one process."""
    grid = ("seed=range(2)", "train.ranks=1,2", "train.batch=4")
    real = ("hydra.launcher.workers=4", "ranks=processes", "out=processes")
    ended = command.end(command.fork(*command.tiny("-m", *grid, *real), cwd=empty))
    assert (ended.status, ended.err) == (0, ""), ended
    command.call(*command.tiny("-m", *grid, "out=simulated"))
    kills.check(empty / "processes", empty / "simulated")
    packs = list(read_packs(empty / "processes"))
    found = {pack.attributes["trials"][0]["train"]["ranks"]: pack.attributes["environment"] for pack in packs}
    assert found[2]["processes"] == 2 and "processes" not in found[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["ranks=processes"],
            "ranks=processes: every trial has train.ranks=1; allowed: simulated, or train.ranks >= 2",
        ),
        (["ranks=real", "train.ranks=2"], "ranks=real: out of range; allowed: simulated, processes"),
    ],
)
def test_what_is_refused(empty: Path, arguments: Sequence[str], words: str) -> None:
    assert command.refused(empty, *command.tiny("-m", "out=out", *arguments)) == [f"error: {words}"]


def test_processes_share_workers_threads_and_memory(job: Job) -> None:
    executor = LocalExecutor(5).sharing(2)
    assert (executor.workers, executor.fitting([job.pack]).workers) == (3, 3)
    assert LocalExecutor(2).sharing(4).workers == 1
    torch.set_num_threads(4)
    for processes, threads in ((1, 4), (2, 2), (3, 1), (8, 1)):
        with share_of_threads(processes):
            assert torch.get_num_threads() == threads
    with share_of_threads(3, 2):
        assert torch.get_num_threads() == 2, "as asked for by cpu.threads"
    assert torch.get_num_threads() == 4


# --- stopped, killed and gone on ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pack() -> PackPlan:
    """Two golden trials and the faults of each."""
    (pack,) = make_plan(command.tiny_trials(*GRID), (), 12, "cpu", 1).packs
    return pack


@pytest.fixture
def job(pack: PackPlan, tmp_path: Path) -> Job:
    """That pack; a store with other results."""
    open_store(tmp_path, "grid")
    return job_of(pack, tmp_path, block=4, every=1, ranks="processes")


class Killing(Checkpoints):
    """Those of a pack that loses its other ranks before it can save one."""

    def is_due(self, step: int) -> bool:
        for process in others(parent=os.getpid()):
            os.kill(process, signal.SIGKILL)
        return super().is_due(step)


def test_a_pack_goes_on_from_its_checkpoint_bit_for_bit(job: Job, tmp_path: Path) -> None:
    """Asked to stop, killed, bereft of a rank: every rank goes on from what rank 0 has saved."""
    whole = job_of(job.pack, tmp_path / "whole", block=4)
    open_store(whole.out, "grid")
    train_pack(whole)
    own = job.checkpoints
    with pytest.raises(Stopped, match="before step 1$"):
        train_pack(job, Checkpoints(own.folder, every=None, about=own.about, is_stopping=True))
    with pytest.raises(Killed):
        train_pack(job, Dying(own.folder, every=1, about=own.about, dies_at=8))
    with pytest.raises(RankKilled):
        train_pack(job, Killing(own.folder, every=1, about=own.about))
    assert Checkpoints(own.folder).latest == 8, "which is as good as before"
    assert isinstance(train_pack(job), Finished)
    kills.check(job.out, whole.out)


def test_ranks_go_back_to_the_same_checkpoint(job: Job, tmp_path: Path) -> None:
    """A chunk before the newest checkpoint is lost: all ranks go on from the one before it."""
    whole = job_of(job.pack, tmp_path / "whole", block=4)
    open_store(whole.out, "grid")
    train_pack(whole)
    own = job.checkpoints
    with pytest.raises(Killed):
        train_pack(job, Dying(own.folder, every=2, about=own.about, dies_at=8))
    (job.out / "store.zarr" / job.pack.id / "loss" / "c.0.1").unlink()  # steps 4 to 7; the checkpoints are 6 and 8
    with pytest.warns(UserWarning, match="c.0.1: is missing"):
        assert isinstance(train_pack(job), Finished)
    kills.check(job.out, whole.out)


def others(group: int | None = None, parent: int | None = None) -> list[int]:
    """The processes of other ranks in a process group, or those that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, fields = (folder / "cmdline").read_bytes(), (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        is_ours = int(fields[1]) == parent or int(fields[2]) == group
        if b"sweeps.running.processes" in words and fields[0] != "Z" and is_ours:
            found.append(int(folder.name))
    return sorted(found)


def begun(folder: Path, seeds: int = 2, workers: int = 1) -> tuple[Forked, list[int]]:
    """A command whose packs train in processes, and those of the other ranks, once there is a checkpoint."""
    more = (f"seed=range({seeds})", f"hydra.launcher.workers={workers}", "checkpoint.every=20", "out=out")
    process = command.fork(*command.tiny("-m", *LONG, *more), cwd=folder)
    command.until(lambda: list(folder.glob("out/checkpoints/*/20.safetensors")), "a checkpoint")
    return process, others(process.pid)


def test_a_killed_rank_ends_its_pack_with_one_line_and_keeps_the_checkpoint(empty: Path) -> None:
    process, (first, *_) = begun(empty)
    os.kill(first, signal.SIGKILL)
    ended = command.end(process)
    assert ended.status == 1 and "rank 1 of 2 was killed by SIGKILL" in ended.out, ended
    (error,) = (empty / "out/errors").iterdir()
    assert error.read_text().startswith("RankKilled: rank 1 of 2 was killed by SIGKILL\n")
    assert list(empty.glob("out/checkpoints/*/*.safetensors"))


def test_no_rank_outlives_a_command_that_is_killed(empty: Path) -> None:
    """Though its packs train in workers."""
    process, ranks_of_packs = begun(empty, 4, workers=4)
    assert ranks_of_packs
    process.kill()
    process.wait()
    command.until(lambda: command.is_group_gone(process.pid), "the end of all")


def test_ctrl_c_ends_all_of_them_without_a_word(empty: Path) -> None:
    process, _ = begun(empty)
    os.killpg(process.pid, signal.SIGINT)
    ended = command.end(process)
    assert ended.status == 130 and "Traceback" not in ended.out + ended.err, ended
    assert not others(process.pid)
    command.until(lambda: command.is_group_gone(process.pid), "the end of all")


# --- a rank that fails ----------------------------------------------------------------------------------------------


def test_the_trace_of_a_rank_that_fails_is_kept() -> None:
    rank = 2
    with pytest.raises(RankFailed) as caught, ranks(3, CPU, fails, (rank,)) as group:
        fails(group, rank)
    assert not isinstance(caught.value, RankKilled)
    first, *rest = str(caught.value).splitlines()
    assert first == f"rank {rank} of 3: ValueError: of no use"
    assert 'in fails\n    raise ValueError("of no use")' in "\n".join(rest)


def test_a_rank_that_dies_before_the_first_word() -> None:
    with pytest.raises(RankKilled, match="^rank 1 of 2 was killed by SIGKILL"), ranks(2, CPU, dies_at_once) as group:
        group.gather(torch.zeros(1))


def test_what_ranks_tell_one_another() -> None:
    with ranks(2, CPU, exchange) as group:
        exchange(group)
        assert group.backend == "gloo"
