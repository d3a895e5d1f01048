"""What a results folder says of Slurm's jobs, right or wrong, and what is believed of it.

Slurm's answers are given here; `tests/slurm/test_strangers.py` asks a real one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config import ConfigError
from harness.storage.results_folder import ResultsPath
from sweeps.planning.planner import make_plan
from sweeps.running.job import Job
from sweeps.slurm.squeue import Queued, name_of
from sweeps.slurm.submitted import running_jobs, submitted, submitting, write_down_all
from tests.jobs import job_of
from tests.sweeps import command

TOKEN = "0123456789ab"

Says = Callable[..., None]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep of four trials in one pack."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert command.call(*command.tiny("seed=range(4)", f"out={out}")).status == 0
    return out


@pytest.fixture
def done(finished: Path, empty: Path) -> Path:
    """A copy of that sweep."""
    return Path(shutil.copytree(finished, empty / "out"))


@pytest.fixture
def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """What squeue answers from now on; without lines, there is none. scancel says what it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("cat", "id"):
        (folder / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(folder))

    def says(*lines: str) -> None:
        (folder / "answer").write_text("".join(f"{line}\n" for line in lines))
        (folder / "squeue").write_text(f"#!/bin/sh\ncat {folder}/answer\n")
        (folder / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {folder}/cancelled\n')
        for name in ("squeue", "scancel"):
            (folder / name).chmod(0o755)

    return says


def cancelled(folder: Path) -> list[str]:
    file = folder / "bin" / "cancelled"
    return file.read_text().splitlines() if file.exists() else []


def line(number: str, out: Path, state: str = "PENDING", reason: str = "Priority", **other: Any) -> str:
    """A job that was submitted for `out`, as squeue has it."""
    name = other.get("name", name_of(ResultsPath.open(out), TOKEN))
    script = other.get("script", out / "slurm" / TOKEN / "submission.sh")
    return f"{number}|{other.get('user', os.getuid())}|{state}|{reason}|{name}|{script}"


def planned(out: Path, *overrides: str) -> list[Job]:
    """The jobs of a sweep that has not been trained."""
    given = command.tiny_trials(*overrides)
    own = ResultsPath.open(out).id
    return [job_of(pack, out, folder_id=own) for pack in make_plan(given, (), 2, "cpu", 1).packs]


@pytest.fixture
def noted(done: Path) -> list[Job]:
    """Two jobs of one array that have been submitted for `done`: 17_0 and 17_1."""
    jobs = planned(done.absolute(), "optim.lr=0.1,0.2,0.3,0.4")
    write_down_all(ResultsPath.open(done), [[job] for job in jobs], "17")
    assert len(jobs) == 2
    return jobs


# --- files that nobody can read --------------------------------------------------------------------------------------

CONTENTS = {
    "binary": b"\xff\x00\x80",
    "empty": b"",
    "no object": b"[]",
    "no job": b"{}",
    "a number": b'{"job": 17}',
    "an option": b'{"job": "--user=root"}',
    "a short option": b'{"job": "-u"}',
    "a command": b'{"job": "1;rm"}',
    "a range": b'{"job": "1-1000"}',
    "nothing but a sign": b'{"job": "_"}',
    "other digits": '{"job": "\uff11\uff17"}'.encode(),
    "too long": b'{"job": "' + b"9" * 5000 + b'"}',
    "nested": b"[" * 100_000,
    "a huge number": b'{"job": ' + b"9" * 5000 + b"}",
}
KINDS = {
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to(__file__),
    "a link to nothing": lambda path: path.symlink_to(path / "nowhere"),
}


def damage(file: Path, what: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    file.unlink(missing_ok=True)
    if what in CONTENTS:
        file.write_bytes(CONTENTS[what])
    else:
        KINDS[what](file)


def test_a_damaged_note_of_a_pack_that_is_done_is_named_and_hinders_nothing(done: Path, slurm_says: Says) -> None:
    """With Slurm and without."""
    (pack,) = (file.parent.name for file in done.glob("store.zarr/*/zarr.json"))
    file = done / "slurm" / "packs" / f"{pack}.json"
    for has_slurm in (False, True):
        if has_slurm:
            slurm_says()
        for what in (*CONTENTS, *KINDS):
            damage(file, what)
            for word in ("status", "cancel"):
                ended = command.call(word, "out")
                assert (ended.status, ended.err) == (None, ""), what
                (named,) = [text for text in ended.out.splitlines() if text.startswith("left out: ")]
                assert named.startswith(f"left out: {file.absolute()}: ")
            jobs, (warning,) = running_jobs(done)
            assert not jobs and warning.startswith(f"left out: {file.absolute()}: ")
    assert not cancelled(done.parent)


def test_a_damaged_file_of_what_is_being_submitted_is_named(done: Path, slurm_says: Says) -> None:
    file = done / "slurm" / "submitting" / f"{TOKEN}.json"
    for what in ("binary", "no object", "nested", *KINDS):
        damage(file, what)
        slurm_says()
        for word in ("status", "cancel"):
            ended = command.call(word, "out")
            assert ended.status is None and f"left out: {file.absolute()}: " in ended.out, what
        # Once Slurm has a job of this folder, nobody knows what it trains.
        slurm_says(line("17_0", done))
        with pytest.raises(ConfigError, match=rf"of this sweep \(17_0\), and what they train cannot be read.*{TOKEN}"):
            running_jobs(done)
    assert "  Slurm job 17_0  pending (Priority); what it trains cannot be read\n" in command.call("status", "out").out


@pytest.mark.parametrize("name", ["slurm", "slurm/packs", "slurm/submitting"])
def test_a_folder_that_is_a_link_is_not_looked_into(done: Path, slurm_says: Says, noted: list[Job], name: str) -> None:
    shutil.move(done / name, done.parent / "elsewhere") if (done / name).exists() else (done / "elsewhere").mkdir()
    (done / name).symlink_to(done.parent / "elsewhere")
    before = command.tree(done.parent / "elsewhere")
    slurm_says()
    for word in ("status", "cancel"):
        ended = command.call(word, "out")
        assert ended.status is None and str(done / name) in ended.out and "is a link" in ended.out
    assert command.tree(done.parent / "elsewhere") == before


# --- what is believed ------------------------------------------------------------------------------------------------


def test_packs_whose_jobs_slurm_has_are_not_trained_again(done: Path, slurm_says: Says, noted: list[Job]) -> None:
    slurm_says(line("17_0", done), line("17_1", done, "RUNNING", "None"))
    assert running_jobs(done)[0] == {noted[0]: "17_0", noted[1]: "17_1"}
    out = command.call("status", "out").out
    assert f"  {noted[0].pack.id}  Slurm job 17_0, pending (Priority)\n" in out
    assert f"  {noted[1].pack.id}  Slurm job 17_1, starting\n" in out
    cancel = command.call("cancel", "out")
    assert cancel.out.startswith("cancelled 2 Slurm jobs;") and "left alone" not in cancel.out
    assert cancelled(done.parent) == [f"--user={os.getuid()} 17"]


STRANGERS = {
    "of another name": {"name": "protein_folding"},
    "of a sweep with another id": {"name": f"sweep-{'0' * 32}-{TOKEN}"},
    "of another folder": {"script": f"/elsewhere/slurm/{TOKEN}/submission.sh"},
    "of another array's script": {"script": "slurm/ba9876543210/submission.sh"},
    "without a script": {"script": "(null)"},
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_job_with_the_number_of_a_note_is_not_the_folders_for_that(
    done: Path, slurm_says: Says, noted: list[Job], what: str
) -> None:
    slurm_says(line("17_0", done, **STRANGERS[what]))
    assert not submitted(done).jobs and not running_jobs(done)[0]
    assert "queued: 0 packs" in command.call("status", "out").out
    ended = command.call("cancel", "out")
    assert "cancelled 0 Slurm jobs" in ended.out and not cancelled(done.parent)
    (named,) = [text for text in ended.out.splitlines() if text.endswith(": left alone")]
    assert named.startswith("Slurm job 17_0 of ")
    assert ended.status == (1 if "name" not in STRANGERS[what] else None)


def test_another_users_job_for_this_folder_is_seen_and_left_alone(
    done: Path, slurm_says: Says, noted: list[Job]
) -> None:
    slurm_says(line("17_0", done, user=os.getuid() + 1), line("17_1", done))
    assert len(running_jobs(done)[0]) == 2
    ended = command.call("cancel", "out")
    assert ended.status == 1 and "Slurm job 17_0 of " in ended.out and "left alone" in ended.out
    assert cancelled(done.parent) == [f"--user={os.getuid()} 17"]


def test_a_copy_of_a_folder_has_none_of_its_jobs(done: Path, slurm_says: Says, noted: list[Job]) -> None:
    slurm_says(line("17_0", done), line("17_1", done))
    shutil.copytree(done, "copy")
    assert not running_jobs(Path("copy"))[0] and len(running_jobs(done)[0]) == 2
    ended = command.call("cancel", "copy")
    assert ended.status == 1 and ended.out.count(f" for '{done}' is not this folder's: left alone") == 2
    assert not cancelled(done.parent)


def test_what_a_job_trains_that_nobody_can_read_is_not_trained_beside_it(
    done: Path, slurm_says: Says, noted: list[Job]
) -> None:
    """Also where the job of the damaged note is that of another, whole one."""
    slurm_says(line("17_0", done))
    (done / "slurm" / "packs" / f"{noted[1].pack.id}.json").write_text("{")
    allowed = "allowed: the same command once they have ended, or after: stability-harness cancel"
    with pytest.raises(ConfigError, match=rf"\(17_0\).*{noted[1].pack.id}.json: is not JSON.*{allowed}"):
        running_jobs(done)
    slurm_says()
    assert running_jobs(done)[0] == {}
    slurm_says(line("17_0", done))
    text = (done / "slurm" / "packs" / f"{noted[0].pack.id}.json").read_text()
    (done / "slurm" / "packs" / f"{noted[1].pack.id}.json").write_text(text)  # whole, but of another pack
    with pytest.raises(ConfigError, match="is of another pack"):
        running_jobs(done)


def test_a_note_of_the_wrong_types_is_a_damaged_one(done: Path, slurm_says: Says, noted: list[Job]) -> None:
    file = done / "slurm" / "packs" / f"{noted[0].pack.id}.json"
    record = json.loads(file.read_text())
    slurm_says(line("17_0", done))
    assert list(submitted(done).jobs) == [noted[0]]
    keys = ("trials", "witnesses", "device", "block", "every", "minutes", "ranks")
    for key, value in itertools.product(keys, (None, -1, "x", [1], {"a": {}}, [{}], 1e400)):
        if key in ("every", "minutes") and value is None:
            continue  # allowed
        file.write_text(json.dumps({**record, key: value}))
        found = submitted(done)
        assert [error.path for error in found.damaged] == [file.absolute()] and not found.jobs, (key, value)
    for key, value in itertools.product(record["trials"][0], (None, -1, "x", [1], {"a": {}})):
        trials = [{**record["trials"][0], key: value}, *record["trials"][1:]]
        file.write_text(json.dumps({**record, "trials": trials}))
        found = submitted(done)
        assert [error.path for error in found.damaged] == [file.absolute()] and not found.jobs, (key, value)


def test_without_slurm_it_is_asked_for_only_where_something_may_be_in_the_queue(
    done: Path, slurm_says: Says, noted: list[Job]
) -> None:
    said = "its packs were submitted, and squeue does not answer; allowed: a running Slurm"
    for word in ("status", "cancel"):
        assert command.refused(done, word, "out") == [f"error: out={done}: {said}"]
    shutil.rmtree(done / "slurm" / "packs")
    assert command.call("status", "out").status is None
    with submitting(ResultsPath.open(done), TOKEN, [noted]):
        assert command.refused(done, "status", "out") == [f"error: out={done}: {said}"]
    assert command.call("status", "out").status is None


# --- what slurm says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "pending (Priority)"),
        ("Resources", "pending (Resources)"),
        ("QOSMaxCpuPerUserLimit", "pending (QOSMaxCpuPerUserLimit)"),
        ("AssocGrpCpuLimit", "pending (AssocGrpCpuLimit)"),
        ("ReqNodeNotAvail, May be reserved for other job", "pending (ReqNodeNotAvail, May be reserved for other job)"),
        ("BadConstraints", "pending, cannot start: no node has what it asks for (BadConstraints)"),
        (
            "QOSMaxCpuPerJobLimit",
            "pending, cannot start: it asks for more than its qos or account allows a job (QOSMaxCpuPerJobLimit)",
        ),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "pending, cannot start: the nodes that it could have are down or drained "
            "(ReqNodeNotAvail, UnavailableNodes:n[1-2])",
        ),
    ],
)
def test_a_job_says_why_it_waits(reason: str, words: str) -> None:
    assert Queued("1_0", 0, "PENDING", reason, "", Path()).description == words
    assert Queued("1_0", 0, "RUNNING", "None", "", Path()).description == "running"
