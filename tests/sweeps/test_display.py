"""What a sweep shows: lines, a bar on a terminal, and no more workers than fit."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from harness.config import Trial
from harness.storage import progress_files
from harness.storage.store import open_store
from sweeps.planning.planner import make_plan, pack_bytes
from sweeps.running import local, progress
from sweeps.running.job import Finished, Job, record_failure
from sweeps.running.local import LocalExecutor
from tests.jobs import job_of
from tests.sweeps import command

GRID = ("seed=range(4)", "optim.lr=1e-2,1e-1")  # 8 trials, 2 packs


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = tmp_path / ("long" * 30) / "[red]out[/red]"  # neither wrapped nor taken for markup
    ended = command.call(*command.tiny("seed=10,11", "train.steps=40", f"out='{out}'"))
    assert ended.out.splitlines() == [
        f"study grid -> {out}",
        "2 trials asked for, 0 golden twins added, 0 complete already: 2 to train in 1 pack",
        "trained 2 of 2 trials: 2 trained",
        f"results in {out}",
    ]


def look_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at every look, and none but those of the test."""
    for name, seconds in {"FIRST_SECONDS": -1.0, "PLAIN_SECONDS": -1.0, "REDRAW_SECONDS": 1e6}.items():
        monkeypatch.setattr(progress, name, seconds)


def write(job: Job, **values: int) -> None:
    """The progress file of a pack of two trials."""
    job.progress_file.path.write_text(json.dumps({"of": job.pack.trials[0].steps, "trials": 2, **values}))


def test_one_worker_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains in the command's own process. Watching it changes no bit."""
    arguments = command.tiny("seed=range(2)", "train.steps=100", "telemetry.block=100")  # one block: it says more often
    assert command.call(*arguments, f"out={tmp_path}/alone").status == 0
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.001)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(progress_files, "WRITE_SECONDS", 0.0)
    ended = command.call(*arguments, f"out={tmp_path}/watched", shows_progress=True)
    shown = [line for line in ended.out.splitlines() if "0/2 trials" in line]
    assert ended.status == 0 and re.search(r", about \d+ s left$", shown[-1]), ended.out
    assert shown[0].endswith((", waiting", ", starting"))
    assert command.differing(*(command.results(tmp_path / name) for name in ("alone", "watched"))) == []


def test_a_finished_sweep_has_nothing_to_train(tmp_path: Path) -> None:
    for seeds, words in (("0", "the trial is"), ("0,1", "all 2 trials are")):
        assert command.call(*command.tiny(f"seed={seeds}", f"out={tmp_path}/out")).status == 0
        again = command.call(*command.tiny(f"seed={seeds}", f"out={tmp_path}/out"))
        assert f"nothing to train: {words} complete already" in again.out.splitlines()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four pages, two of which are the folder's and a file's."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system") if not os.environ.get("CI") else pytest.fail("needs root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_at_the_start_is_one_line(tiny_disk: Path) -> None:
    (tiny_disk / "full").write_bytes(b"x" * 2**14)
    ended = command.call(*command.tiny(f"out={tiny_disk}/out"))
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == (
        f"error: out={tiny_disk}/out: the results of 1 trial take more than 0.4 KiB; allowed: at most the 0.0 KiB free "
        "there, so fewer trials or steps, or another disk\n"
    )


def test_a_trace_that_has_no_room_is_not_named(tiny_disk: Path) -> None:
    ended = command.call(*command.tiny(f"out={tiny_disk}/out"))
    assert (ended.status, ended.err) == (1, "")
    assert "(its trace could not be written: No space left on device)\n" in ended.out
    assert "trace in" not in ended.out and not list(tiny_disk.glob("out/errors/*"))


def test_no_more_workers_than_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan([Trial(seed=seed) for seed in range(6)], (), 2, "cpu", 1)
    largest = max(pack_bytes(pack) for pack in plan.packs)
    for times, workers in ((1.0, 1), (2.9, 2), (100.0, 4)):
        monkeypatch.setattr(local, "main_memory", lambda times=times: int(times * largest))
        assert LocalExecutor(4).fitting(plan.packs) == LocalExecutor(workers)
    assert LocalExecutor(4).fitting([]) == LocalExecutor(4)


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLUMNS": "120"}
    process = command.start(*command.tiny(*GRID, "out=out"), cwd=tmp_path, stdout=slave, **terminal)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed: it has ended
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    ended = command.end(process)
    assert (ended.status, ended.err) == (0, "")
    text = shown.decode()
    assert "\x1b[?25l" in text and "\x1b[?25h" in text  # the cursor was hidden, and is shown again
    assert re.search(r"8/8 trials, \d diverged, [\d,]+ trial-steps/s", text)
    assert re.search(r"100%.* 8/8 trials", text)
    assert "trained 8 of 8 trials" in text


def test_progress_counts_packs_that_run_end_and_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, a line now and then; here, at every look."""
    look_only_here(monkeypatch)
    trials = [Trial(seed=seed) for seed in range(6)]
    plan = make_plan(trials, (), 2, "cpu", 1)
    open_store(tmp_path, "grid")
    first, second, third = (job_of(pack, tmp_path, block=50) for pack in plan.packs)
    shown = StringIO()
    with progress.Display(plan.packs, tmp_path, Console(file=shown, width=200)) as display:
        display.update()
        first.progress_file.parent.make_folder()
        write(first, begun=0, steps=100, frozen=1)
        display.update()
        second.progress_file.path.write_text("{torn")
        display.update()
        first.progress_file.unlink()
        display.finished(Finished(first.pack.id, ("trained", "non-finite"), 0))
        display.finished(record_failure(second, "RuntimeError: out of luck", "trace"))
        display.finished(Finished(third.pack.id, ("trained", "trained"), 0))
    lines = shown.getvalue().splitlines()
    assert "\x1b" not in shown.getvalue()
    assert [re.match(r"\d/\d trials, \d diverged", line)[0] for line in lines if "trials" in line] == [
        "0/6 trials, 0 diverged",
        "0/6 trials, 1 diverged",
        "0/6 trials, 1 diverged",
        "2/6 trials, 1 diverged",
        "2/6 trials, 1 diverged",
        "4/6 trials, 1 diverged",
    ]
    assert f"pack {second.pack.id} failed: RuntimeError: out of luck" in lines
    assert sum(line.startswith(f"left out: {second.progress_file}: is not JSON") for line in lines) == 1
    assert lines[0].endswith(", waiting") and re.search(r", about 0 s left$", lines[-1])


def test_the_rate_leaves_out_what_an_earlier_command_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that goes on from a checkpoint: its steps up to there are done, and took none of this command's time."""
    look_only_here(monkeypatch)
    plan = make_plan([Trial(seed=seed) for seed in range(4)], (), 2, "cpu", 1)
    open_store(tmp_path, "grid")
    first, second = (job_of(pack, tmp_path, block=50) for pack in plan.packs)
    shown = StringIO()
    with progress.Display(plan.packs, tmp_path, Console(file=shown, width=200)) as display:
        display.started -= 10
        first.progress_file.parent.make_folder()
        write(first, begun=60, steps=100, frozen=0)
        display.update()
        first.progress_file.unlink()
        display.finished(Finished(first.pack.id, ("trained", "trained"), 0))
    steps = plan.packs[0].trials[0].steps
    rates = [int(found.replace(",", "")) for found in re.findall(r"([\d,]+) trial-steps/s", shown.getvalue())]
    assert rates == [pytest.approx(2 * 40 / 10, abs=1), pytest.approx(2 * (steps - 60) / 10, rel=0.1)]
    assert second.pack.id != first.pack.id
