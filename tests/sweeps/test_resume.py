"""What was begun goes on: from the checkpoints of packs, under the lock of one process, whatever was killed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.model.state import State
from harness.storage.results_folder import FolderLost, ResultsPath
from harness.storage.store import Signal, open_store
from harness.storage.stored import read_packs
from harness.testing.engine import Dying, Killed
from harness.training.pack import Pack
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import make_plan
from sweeps.running import job as job_module
from sweeps.running.job import Elsewhere, Failed, Finished, Job, begun_packs, finished, train_pack, train_pack_safely
from sweeps.running.ledger import lock_of
from tests.jobs import job_of
from tests.sweeps import command, kills
from tests.sweeps.forks import Forked

STEPS = 12
GRID = ("seed=range(2)", "fault=none,weight_bit", "fault.start=6", f"train.steps={STEPS}")


@pytest.fixture(scope="module")
def pack() -> PackPlan:
    """Two golden trials and a fault of each."""
    (pack,) = make_plan(command.tiny_trials(*GRID), (), 8, "cpu", 1).packs
    return pack


@pytest.fixture
def job(pack: PackPlan, tmp_path: Path) -> Job:
    """That pack; a store with other results."""
    open_store(tmp_path, "grid")
    return job_of(pack, tmp_path, block=4, every=1)


def kill(job: Job, step: int) -> None:
    """Train the job up to this step, and no further."""
    own = job.checkpoints
    with pytest.raises(Killed):
        train_pack(job, Dying(own.folder, every=1, about=own.about, dies_at=step))


@pytest.fixture
def steps_trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that any pack has trained, as they are trained."""
    trained: list[int] = []
    learning_rate = Pack.learning_rate

    def noted(pack: Pack, step: int) -> torch.Tensor:
        trained.append(step)
        return learning_rate(pack, step)

    monkeypatch.setattr(Pack, "learning_rate", noted)
    return trained


def test_it_goes_on_from_the_checkpoint_and_leaves_none(job: Job, steps_trained: list[int], tmp_path: Path) -> None:
    whole = job_of(job.pack, tmp_path / "whole", block=4)
    open_store(whole.out, "grid")
    train_pack(whole)
    steps_trained.clear()
    kill(job, 7)
    kill(job, 9)
    done = train_pack(job)
    assert steps_trained == list(range(STEPS))
    assert isinstance(done, Finished) and done.pack == job.pack.id
    kills.check(job.out, whole.out)


def test_the_next_plan_takes_it_over_as_it_is(job: Job) -> None:
    kill(job, 7)
    everything = {trial.id for trial in job.pack.trials}
    (begun,) = begun_packs(job.out, everything)
    assert (begun.id, begun.trials) == (job.pack.id, job.pack.trials)
    more = command.tiny_trials("seed=range(4)", *GRID[1:])
    plan = make_plan(more, (), 3, "cpu", 1, begun=[begun])
    assert begun in plan.packs and len(plan.packs) > 1
    ids = [trial.id for pack in plan.packs for trial in pack.recorded]
    assert len(ids) == len(set(ids)) == 8
    assert begun_packs(job.out, everything - {job.pack.trials[0].id}) == [], "one of its trials is not to be trained"


def test_another_length_of_blocks_changes_nothing_for_what_is_begun(job: Job, steps_trained: list[int]) -> None:
    kill(job, 7)
    assert isinstance(train_pack(job_of(job.pack, job.out, block=5)), Finished)
    assert steps_trained == list(range(STEPS))


@pytest.mark.parametrize("lost", ["block", "group", "checkpoint"])
def test_where_something_is_lost_it_begins_anew(job: Job, steps_trained: list[int], lost: str) -> None:
    kill(job, 9)
    group = job.out / "store.zarr" / job.pack.id
    if lost == "block":
        (group / "learning_rate" / "c.0.1").unlink()
    elif lost == "group":
        group.rename(job.out / "elsewhere")
    else:
        for file in job.checkpoints.folder.path.glob("*.safetensors"):
            file.write_bytes(b"")
    said = {"block": "c.0.1: is missing; what its pack has trained since", "checkpoint": "safetensors: is damaged"}
    with pytest.warns(UserWarning) if lost in said else contextlib.nullcontext() as warned:
        train_pack(job)
    assert all(said[lost] in str(warning.message) for warning in warned or ())
    assert steps_trained[9:] == list(range(STEPS))


def test_a_checkpoint_that_cannot_be_gone_on_from_is_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(job, 7)
    before, restore = job.checkpoints.latest, "harness.loop.loop.restore"
    with monkeypatch.context() as patch:
        patch.setattr(restore, lambda *parts: 1 / 0)
        assert isinstance(train_pack_safely(job), Failed)
    assert before == 7 and job.checkpoints.latest is None
    assert isinstance(train_pack(job), Finished)


@pytest.mark.parametrize("differs", ["a signal", "an array"])
def test_a_checkpoint_of_another_version_stays_as_it_is(
    job: Job, differs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what that version measures, or keeps of a row; who has it can go on."""
    kill(job, 7)
    with monkeypatch.context() as patch:
        if differs == "a signal":
            signals = job_module._signals
            more = {"another": Signal(("trial", "step"), "1", "of a later version")}
            patch.setattr(job_module, "_signals", lambda pack: signals(pack) | more)
        else:
            iterate = State.__iter__
            more = ("another", torch.zeros(1))
            patch.setattr(State, "__iter__", lambda state: iter([*iterate(state), more]))
        failed = train_pack_safely(job)
    assert isinstance(failed, Failed)
    assert "its checkpoint at step 7 is of another version, which differs in another; allowed: that version" in (
        failed.reason
    )
    assert job.checkpoints.latest == 7
    assert isinstance(train_pack(job), Finished)


def test_another_folder_in_its_place_is_left_alone(job: Job) -> None:
    """Such as where two results folders changed names between two packs."""
    planned = replace(job, folder_id=ResultsPath.open(job.out).id)
    shutil.rmtree(job.out)
    with pytest.raises(FolderLost, match=f"out={job.out}: was moved or removed meanwhile"):
        train_pack(planned)
    open_store(job.out, "grid")
    before = command.tree(job.out)
    with pytest.raises(FolderLost, match=f"out={job.out}: was moved or removed meanwhile"):
        train_pack_safely(planned)
    assert command.tree(job.out) == before


def test_what_another_process_trains_is_left_to_it(job: Job) -> None:
    """Until that process has ended, however it did."""
    lock = lock_of(ResultsPath.open(job.out), job.pack.id)
    lock.parent.make_folder()
    with command.held(lock):
        assert train_pack(job) == Elsewhere(job.pack.id)
    assert isinstance(train_pack(job), Finished)
    assert train_pack(job) == finished(job), "and what is complete is not trained again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, to be made smaller."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system") if not os.environ.get("CI") else pytest.fail("needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", disk], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    """What was complete stays; each pack that did not fit says why; with more room the same command goes on."""
    twelve = ("seed=range(12)", "train.steps=8", "pack.size=2")  # 6 packs
    assert command.call(*command.tiny(*twelve, f"out={tmp_path}/whole")).status == 0
    pages = [-(-file.stat().st_size // 4096) for file in (tmp_path / "whole").rglob("*") if file.is_file()]
    resize(small_disk, 4 * sum(pages) * 7 // 12)  # three packs and a half
    arguments = command.tiny(*twelve, "hydra.launcher.workers=2", f"out={small_disk}/out")
    full = command.end(command.fork(*arguments, cwd=tmp_path))
    assert full.status == 1 and "Traceback" not in full.out + full.err, full
    assert "No space left on device" in full.out
    kept = {pack.id: pack for pack in read_packs(small_disk / "out") if pack.complete}
    assert 0 < len(kept) < 6
    resize(small_disk, 1 << 16)
    again = command.end(command.fork(*arguments, cwd=tmp_path))
    assert (again.status, again.err) == (0, "") and f"{2 * len(kept)} complete already" in again.out
    kills.check(small_disk / "out", tmp_path / "whole")


def test_write_permission_is_taken_away(tmp_path: Path) -> None:
    """While packs train. Those say why they failed; once it is given back, the same command goes on."""
    arguments = command.tiny("seed=range(8)", "train.steps=40", "pack.size=4", "checkpoint.every=10")
    # Root may write everywhere, unless it gives that right up.
    bound = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    line = [*bound, sys.executable, "-m", "sweeps", *arguments, f"out={tmp_path}/out"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(line, cwd=command.REPOSITORY, text=True, **pipes)
    command.until(lambda: list(tmp_path.glob("out/checkpoints/*/*.safetensors")), "a checkpoint")
    process.send_signal(signal.SIGSTOP)  # so that it does not end before
    folders = [folder for folder in (tmp_path / "out").rglob("*") if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o500)
    process.send_signal(signal.SIGCONT)
    printed, _ = process.communicate(timeout=60)
    for folder in folders:
        folder.chmod(0o700)
    assert process.returncode == 1 and "Permission denied" in printed, printed
    again = command.call(*arguments, f"out={tmp_path}/out")
    assert (again.status, again.err) == (0, ""), again
    assert command.call(*arguments, f"out={tmp_path}/whole").status == 0
    kills.check(tmp_path / "out", tmp_path / "whole")


def test_two_equal_commands_at_once(tmp_path: Path) -> None:
    arguments = command.tiny("seed=range(6)", "optim.lr=1e-3,1e-2", "train.steps=40", "pack.size=2")
    both, alone = f"out={tmp_path}/both", f"out={tmp_path}/alone"
    processes = [command.fork(*arguments, both, cwd=tmp_path) for _ in range(2)]
    ended = [command.end(process) for process in processes]
    assert [one.status for one in ended] == [0, 0], ended
    assert "0 to train in 0 packs" in command.call(*arguments, both).out
    assert command.call(*arguments, alone).status == 0
    kills.check(tmp_path / "both", tmp_path / "alone")


def test_killed_again_and_again_it_leaves_what_it_leaves_otherwise(tmp_path: Path) -> None:
    """python -m tests.sweeps.kills does it a hundred times."""

    def start(out: Path, steps: int) -> Forked:
        return command.fork(*kills.arguments(out, steps, seeds=1), cwd=tmp_path)

    steps = 90
    whole = kills.arguments(tmp_path / "whole", steps, seeds=1)
    assert command.call(*(text.replace("workers=2", "workers=1") for text in whole)).status == 0
    done = kills.killed_often(tmp_path / "killed", 4, steps, random.Random(0), at_most=0.15, start=start)
    assert done["parent"] + done["worker"] == 4, "it ended before it was killed as often as that"
    kills.check(tmp_path / "killed", tmp_path / "whole")
