"""Jobs that are not a sweep's, jobs that cannot start, and options that Slurm refuses."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.storage.results_folder import ResultsPath
from sweeps.slurm import executor as sweeps_slurm
from sweeps.slurm.submitted import running_jobs
from tests.slurm.conftest import GRID, LAUNCH, arrays, eventually, slurm, sweep
from tests.slurm.test_submitting import put_on_path
from tests.sweeps.command import call, tree

pytestmark = pytest.mark.slurm

HELD = [*GRID, *LAUNCH, "hydra.launcher.minutes_per_job=0", "wait=false", "+hydra.launcher.extra.hold=true"]


def in_queue(*numbers: str) -> list[str]:
    """Which of these arrays have jobs in the queue."""
    return sorted(set(slurm("squeue", "--noheader", "--format=%F", f"--jobs={','.join(numbers)}").split()))


@pytest.fixture
def innocent() -> Iterator[str]:
    """An array of somebody else."""
    options = ["--parsable", "--hold", "--array=0-1", "--job-name=protein", "--output=/dev/null", "--wrap=sleep 600"]
    number = slurm("sbatch", *options).strip()
    yield number
    subprocess.run(["scancel", number], check=True)


def test_only_the_folders_own_jobs_are_cancelled(tmp_path: Path, innocent: str) -> None:
    """Its notes name another sweep's and a stranger's; and a copy of it has no jobs at all."""
    out, other, copy = tmp_path / "out", tmp_path / "other", tmp_path / "copy"
    for folder in (out, other):
        done = sweep(folder, *HELD)
        assert "2 packs submitted" in done.out, done.err
    shutil.copytree(out, copy)
    ((own,), (others,)) = arrays(out), arrays(other)
    for note, number in zip(sorted(out.glob("slurm/packs/*")), (f"{innocent}_0", f"{others}_1"), strict=True):
        note.write_text(json.dumps({**json.loads(note.read_text()), "job": number}))

    # What its jobs train nobody knows now, and it is not trained beside them.
    refused = sweep(out, *HELD)
    assert refused.status == 2 and f"jobs of this sweep ({own}_0, {own}_1)" in refused.err
    assert len(arrays(out)) == 1
    planned = sweep(copy, *HELD, "plan=true")
    assert "4 to train in 2 packs" in planned.out, planned.err

    ended = call("cancel", str(copy))
    assert ended.status == 1 and "cancelled 0 Slurm jobs" in ended.out
    assert ended.out.count(f" for '{out}' is not this folder's: left alone\n") == 2
    assert in_queue(innocent, own, others) == sorted((innocent, own, others))

    ended = call("cancel", str(out))
    assert ended.status is None and "cancelled 2 Slurm jobs" in ended.out
    (first,) = [line for line in ended.out.splitlines() if f" {innocent}_0 " in line]
    assert first.endswith("'protein', is not this sweep's: left alone")
    (second,) = [line for line in ended.out.splitlines() if f" {others}_1 " in line]
    assert second.endswith(" is not this sweep's: left alone")
    eventually(lambda: in_queue(innocent, own, others) == sorted((innocent, others)))
    assert "cancelled 2 Slurm jobs" in call("cancel", str(other)).out
    assert eventually(lambda: in_queue(innocent, others) == [innocent])


class Touch:
    """Whoever reads its pickle makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.file,)


def test_a_job_reads_no_pickle_through_a_link(tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    assert "2 packs submitted" in sweep(out, *HELD).out
    (array,) = arrays(out)
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Touch(victim)))
    (first,) = out.glob("slurm/*/0.pkl")
    (second,) = out.glob("slurm/*/1.pkl")
    first.unlink()
    first.symlink_to(tmp_path / "evil.pkl")
    second.with_name(f"{array}_1_submitted.pkl").symlink_to(tmp_path / "evil.pkl")
    slurm("scontrol", "release", array)
    for number in range(2):
        log = first.parent / f"{array}_{number}_0_log.out"
        said = eventually(lambda log=log: log.exists() and log.read_text())
        assert said.startswith("error: ") and "is a link; allowed: " in said and said.count("\n") == 1
    assert not victim.exists()


@pytest.fixture
def short() -> Iterator[str]:
    """A partition whose jobs may take a minute, for a job that wants five: Slurm takes it and never starts it."""
    name = f"short{uuid.uuid4().hex[:8]}"
    slurm("scontrol", "create", f"partition={name}", "nodes=n1", "maxtime=1", "state=up")
    yield name
    slurm("scontrol", "delete", f"partition={name}")


def test_a_job_that_cannot_start_says_why(
    tmp_path: Path, short: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` does at once, and a sweep that waits for it does once, after a while."""
    line = [*GRID, *LAUNCH, "hydra.launcher.minutes_per_job=0", f"hydra.launcher.partition={short}", "wait=false"]
    done = sweep(tmp_path, *line)
    assert "2 packs submitted" in done.out, done.err
    (array,) = arrays(tmp_path)
    words = "cannot start: it asks for more time than its partition allows (PartitionTimeLimit)\n"
    eventually(lambda: call("status", str(tmp_path)).out.count(f", pending, {words}") == 2)
    monkeypatch.setattr(sweeps_slurm, "OBSTACLE_SECONDS", 0)
    monkeypatch.setattr(sweeps_slurm, "POLL_SECONDS", 0.01)
    capsys.readouterr()
    folder = ResultsPath.open(tmp_path)
    stream = sweeps_slurm._follow(folder, running_jobs(tmp_path)[0])
    for _ in range(5):
        assert next(stream) is None
    said = capsys.readouterr().err
    assert said.startswith(f"warning: Slurm job {array}_") and said.count(" and 1 more cannot start: ") == 1
    assert said.count("\n") == 1 and words.strip() in said
    assert "cancelled 2 Slurm jobs" in call("cancel", str(tmp_path)).out


def test_a_refused_option_leaves_nothing_behind(tmp_path: Path) -> None:
    for option in ("partition=nowhere", "constraint=nothing", "gpus=99", "extra.bogus=1"):
        word = f"{'+' * option.startswith('extra')}hydra.launcher.{option}"
        ended = sweep(tmp_path / "new" / "out", *GRID, *LAUNCH, word)
        (line,) = ended.err.splitlines()
        assert ended.status == 2 and line.startswith("error: hydra/launcher=slurm: "), option
        assert not (tmp_path / "new").exists(), option


def test_of_arrays_of_which_one_is_refused_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would, where a user has as many jobs as are allowed; here a script refuses the second array."""
    put_on_path(tmp_path / "control", "scontrol", "$real \"$@\" | sed 's/^MaxArraySize .*/MaxArraySize = 1/'")
    said = "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    refusing = f'if [ -e {tmp_path}/once ]; then echo "{said}" >&2; exit 1; fi; touch {tmp_path}/once; exec $real "$@"'
    path = put_on_path(tmp_path / "batch", "sbatch", refusing)
    monkeypatch.setenv("PATH", f"{tmp_path}/control:{path}")
    out = tmp_path / "out"
    ended = sweep(out, *HELD)
    (line,) = ended.err.splitlines()
    assert ended.status == 2 and said in line and line.endswith("1 pack submitted before stays in the queue")
    assert len(arrays(out)) == len(list(out.glob("slurm/packs/*"))) == len(list(out.glob("slurm/*/*.sh"))) == 1
    assert not list(out.glob("slurm/submitting/*"))
    assert "cancelled 1 Slurm job;" in call("cancel", str(out)).out


def test_what_is_refused_only_when_asked_for_a_test_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while all nodes are down, which `sbatch --test-only` takes for a refusal."""
    real = shutil.which("sbatch")
    path = put_on_path(tmp_path / "bin", "sbatch", "")
    (tmp_path / "bin" / "sbatch").write_text(
        f'#!/bin/bash\n[[ $1 == --test-only ]] && echo "allocation failure" >&2 && exit 1\nexec {real} "$@"\n'
    )
    monkeypatch.setenv("PATH", path)
    done = sweep(tmp_path / "out", *HELD)
    assert "2 packs submitted" in done.out, done.err
    doubt = "Slurm takes these options, but its jobs may not start (allocation failure)"
    assert done.err == f"warning: hydra/launcher=slurm: {doubt}\n"
    assert not slurm("squeue", "--noheader", f"--name={sweeps_slurm.PROBE}", "--format=%i")
    before = tree(tmp_path)
    assert sweep(tmp_path / "new", *HELD, "hydra.launcher.partition=nowhere").status == 2
    assert tree(tmp_path) == before
    assert "cancelled 2 Slurm jobs" in call("cancel", str(tmp_path / "out")).out
