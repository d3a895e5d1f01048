"""Chunks that are lost or damaged: found out when a pack goes on, when it ends, when it is read, and on demand."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import analysis
from analysis.__main__ import main
from harness.storage.checkpoint import Checkpoints, Stopped
from harness.storage.progress_files import write_plan
from harness.storage.store import open_store
from harness.storage.stored import STORE, DamagedStore
from harness.storage.zarr_files import METADATA
from harness.testing.engine import Dying, Killed
from sweeps.planning.packs import PackPlan
from sweeps.planning.planner import make_plan
from sweeps.running.job import Failed, Finished, Job, train_pack, train_pack_safely
from tests.jobs import job_of
from tests.sealing import seal_again
from tests.sweeps import command, kills

STEPS, BLOCK = 12, 2
GRID = ("seed=range(2)", "fault=none,weight_bit", "fault.start=6", f"train.steps={STEPS}")


@pytest.fixture(scope="module")
def pack() -> PackPlan:
    (pack,) = make_plan(command.tiny_trials(*GRID), (), 8, "cpu", 1).packs
    return pack


@pytest.fixture(scope="module")
def whole(pack: PackPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What undisturbed training leaves."""
    out = tmp_path_factory.mktemp("whole")
    write_plan(open_store(out, "grid"), [trial.id for trial in pack.recorded])
    assert isinstance(train_pack(job_of(pack, out, block=BLOCK)), Finished)
    return out


@pytest.fixture
def job(pack: PackPlan, tmp_path: Path) -> Job:
    write_plan(open_store(tmp_path / "out", "grid"), [trial.id for trial in pack.recorded])
    return job_of(pack, tmp_path / "out", block=BLOCK, every=3)


@pytest.fixture
def copied(whole: Path, empty: Path) -> Path:
    """A copy of what undisturbed training leaves."""
    return Path(shutil.copytree(whole, empty / "out"))


def chunks(out: Path, block: int) -> list[Path]:
    """The files of a block, of all signals."""
    return sorted(out.glob(f"{STORE}/*/*/c.0.{block}*"))


def lose(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


def blank(file: Path) -> None:
    """As some file systems leave it after a loss of power."""
    file.write_bytes(bytes(file.stat().st_size))


HARM = [lose, truncate, flip, blank]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("signal", ["loss", "validation_loss", "attention_logit_max"])
def test_a_pack_that_goes_on_trains_again_what_is_damaged(
    job: Job, whole: Path, harm: Callable[[Path], None], signal: str
) -> None:
    """Killed after step 9, whose checkpoint counts; of the block at step 6 a file is damaged: the checkpoint before."""
    with pytest.raises(Killed):
        own = job.checkpoints
        train_pack(job, Dying(own.folder, every=3, about=own.about, dies_at=9))
    (victim,) = (file for file in chunks(job.out, 3) if file.parent.name == signal)
    harm(victim)
    with pytest.warns(UserWarning, match=rf"{signal}/c\.0\.3.*(missing|damaged).*trained again"):
        assert isinstance(train_pack(job), Finished)
    kills.check(job.out, whole)


def test_where_no_checkpoint_is_before_the_damage_it_begins_anew(job: Job, whole: Path) -> None:
    with pytest.raises(Killed):
        own = job.checkpoints
        train_pack(job, Dying(own.folder, every=3, about=own.about, dies_at=9))
    lose(chunks(job.out, 0)[0])
    with pytest.warns(UserWarning, match="is missing; what its pack has trained since"):
        train_pack(job)
    kills.check(job.out, whole)


def test_what_is_trained_since_the_damage_is_kept_by_the_next_checkpoint(job: Job, whole: Path) -> None:
    """Those that rest on lost chunks are gone: they would take the place of the next one, and be no use again."""
    own = job.checkpoints
    with pytest.raises(Killed):
        train_pack(job, Dying(own.folder, every=3, about=own.about, dies_at=9))
    lose(chunks(job.out, 3)[0])  # steps 6 and 7; the checkpoints are 6 and 9
    with pytest.warns(UserWarning, match="is missing"), pytest.raises(Stopped, match="before step 7$"):
        train_pack(job, Checkpoints(own.folder, about=own.about, is_stopping=True))
    assert own.latest == 7
    assert isinstance(train_pack(job), Finished)
    kills.check(job.out, whole)


class Harming:
    """Damages a chunk the first time that training has come to a step."""

    def __init__(self, job: Job, harm: Callable[[Path], None], times: int = 1):
        self.job, self.harm, self.times = job, harm, times

    def __call__(self) -> bool:
        written = chunks(self.job.out, 4)
        if written and self.times:
            self.times -= 1
            self.harm(written[0])
        return False


@pytest.mark.parametrize("harm", HARM)
def test_a_chunk_that_is_damaged_before_the_end_is_trained_again(
    job: Job, whole: Path, harm: Callable[[Path], None]
) -> None:
    checkpoints = job.checkpoints
    checkpoints.asked = Harming(job, harm)
    with pytest.warns(UserWarning, match="trained again"):
        assert isinstance(train_pack(job, checkpoints), Finished)
    kills.check(job.out, whole)


def test_a_disk_that_keeps_nothing_is_a_failure(job: Job) -> None:
    checkpoints = job.checkpoints
    checkpoints.asked = Harming(job, blank, times=10**6)
    with pytest.warns(UserWarning, match="trained again"):
        failed = train_pack_safely(job, checkpoints)
    assert isinstance(failed, Failed)
    assert failed.reason.endswith("after 3 attempts: the disk does not keep what is written to it")
    assert not analysis.open_sweep(job.out).complete.any()


@pytest.mark.parametrize("harm", HARM)
def test_reading_a_damaged_chunk_names_it(copied: Path, harm: Callable[[Path], None]) -> None:
    (victim,) = (file for file in chunks(copied, 2) if file.parent.name == "loss")
    harm(victim)
    sweep = analysis.open_sweep(copied)
    assert np.isfinite(sweep.grad_norm.values).any()
    with pytest.raises(DamagedStore, match=rf"{victim}: is (damaged|missing)"):
        sweep.loss.values  # noqa: B018


def test_a_finished_store_is_verified(copied: Path) -> None:
    ended = command.call("verify", "out")
    number = len(chunks(copied, 0)) * STEPS // BLOCK
    line = f"out: 1 pack, {number} chunks: every file is as it was written\n"
    assert (ended.status, ended.out, ended.err) == (None, line, "")


def test_verifying_names_each_damaged_file(copied: Path) -> None:
    victims = chunks(copied, 1)[: len(HARM)]
    for harm, victim in zip(HARM, victims, strict=True):
        harm(victim)
    ended = command.call("verify", "out")
    assert ended.status == 1
    lines = ended.out.splitlines()
    assert sorted(line.split(": ")[1] for line in lines[:-1]) == sorted(str(victim) for victim in victims)
    assert all(line.startswith("damaged: ") for line in lines[:-1]) and lines[-1].endswith(": 4 damaged files")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"strikes":[', '"strikes":[1'), ('"width":16', '"width":61'), ('"complete":true', '"complete":1'), ("{", "")],
    ids=["a number", "a configuration", "a type", "no JSON"],
)
def test_damaged_metadata_are_found(copied: Path, old: str, new: str) -> None:
    (file,) = copied.glob(f"{STORE}/*/{METADATA}")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    ended = command.call("verify", "out")
    assert ended.status == 1 and f"damaged: {file}: " in ended.out


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"width":16', '"width":"nan"', "error: a stored trial has model.width='nan', which is no number; allowed: "),
        ('"lr":0.003', '"lr":["a"]', "error: a stored trial has optim.lr=['a'], which is no number; allowed: "),
    ],
)
def test_a_configuration_that_nobody_can_reckon_with_is_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    (file,) = copied.glob(f"{STORE}/*/{METADATA}")
    text = file.read_text()
    assert old in text
    seal_again(file, text.replace(old, new))
    for name in ("report", "campaign"):
        capsys.readouterr()
        assert main([name, "out"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and err.startswith(said), err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r'"width":16', f'"width":{"9" * 400}', "99 is beyond 64 bits"),
        (r'"attributes":\{"units":[^}]*\}', '"attributes":4', "AttributeError: 'int' object"),
        (r'"metadata":\{', '"metadata":[{', "JSONDecodeError: "),
        (r'"dimension_names":\["trial"', '"dimension_names":[["trial"]', "ValueError: array "),
    ],
)
def test_metadata_of_another_kind_are_no_pack(copied: Path, old: str, new: str, said: str) -> None:
    (file,) = copied.glob(f"{STORE}/*/{METADATA}")
    text, times = re.subn(old, new, file.read_text())
    assert times
    seal_again(file, text)
    with pytest.warns(UserWarning, match=f"not a pack, left out .*{said}"):
        assert not analysis.open_sweep(copied).trial.size


def test_what_is_not_finished_is_not_damaged(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        own = job.checkpoints
        train_pack(job, Dying(own.folder, every=3, about=own.about, dies_at=9))
    monkeypatch.chdir(job.out.parent)
    ended = command.call("verify", "out")
    assert ended.status is None and "1 pack (1 not finished)" in ended.out
