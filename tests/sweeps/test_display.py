"""What a sweep shows: lines, a bar on a terminal, and no more workers than fit."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from harness.config import Trial
from harness.store import open_store
from sweeps import local, progress
from sweeps.local import LocalExecutor
from sweeps.planner import make_plan, pack_bytes
from sweeps.run import Finished, Job, record_failure

GRID = ("seed=range(4)", "optim.lr=1e-2,1e-1")  # 8 trials, 2 packs


def test_plain_lines_where_there_is_no_terminal(command: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / ("long" * 30) / "[red]out[/red]"  # neither wrapped nor taken for markup
    ended = command.call(*command.tiny("seed=10,11", "train.steps=40", f"out='{out}'"))
    assert ended.out.splitlines() == [
        f"study grid -> {out}",
        "2 trials asked for, 0 golden twins added, 0 complete already: 2 to train in 1 pack",
        "trained 2 of 2 trials: 2 trained",
        f"results in {out}",
    ]


def test_no_more_workers_than_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan([Trial(seed=seed) for seed in range(6)], (), 2, "cpu", 1)
    largest = max(pack_bytes(pack) for pack in plan.packs)
    for times, workers in ((1.0, 1), (2.9, 2), (100.0, 4)):
        monkeypatch.setattr(local, "machine_memory", lambda times=times: int(times * largest))
        assert LocalExecutor(4).fitting(plan.packs) == LocalExecutor(workers)
    assert LocalExecutor(4).fitting([]) == LocalExecutor(4)


def test_a_bar_on_a_terminal(command: ModuleType, tmp_path: Path) -> None:
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
    assert re.search(r"48/48.* trial-steps", text)
    assert "trained 8 of 8 trials" in text


def test_progress_counts_packs_that_run_end_and_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no terminal, a line now and then; here, at every look."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", -1.0)
    trials = [Trial(seed=seed) for seed in range(6)]
    plan = make_plan(trials, (), 2, "cpu", 1)
    open_store(tmp_path, "grid")
    first, second, third = (Job(pack, tmp_path, "cpu", 50) for pack in plan.packs)
    shown = StringIO()
    with progress.Display(plan.packs, tmp_path, Console(file=shown, width=200)) as display:
        display.update()
        first.progress_file.parent.make_folder()
        first.progress_file.path.write_text(json.dumps({"begun": 0, "steps": 100, "trials": 2, "frozen": 1}))
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
    assert re.search(r", 0 s left$", lines[-1])


def test_the_rate_leaves_out_what_an_earlier_command_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that goes on from a checkpoint: its steps up to there are done, and took none of this command's time."""
    monkeypatch.setattr(progress, "PLAIN_SECONDS", -1.0)
    plan = make_plan([Trial(seed=seed) for seed in range(4)], (), 2, "cpu", 1)
    open_store(tmp_path, "grid")
    first, second = (Job(pack, tmp_path, "cpu", 50) for pack in plan.packs)
    shown = StringIO()
    with progress.Display(plan.packs, tmp_path, Console(file=shown, width=200)) as display:
        display.started -= 10
        first.progress_file.parent.make_folder()
        first.progress_file.path.write_text(json.dumps({"begun": 60, "steps": 100, "trials": 2, "frozen": 0}))
        display.update()
        first.progress_file.unlink()
        display.finished(Finished(first.pack.id, ("trained", "trained"), 0))
    steps = plan.packs[0].trials[0].steps
    rates = [int(found.replace(",", "")) for found in re.findall(r"([\d,]+) trial-steps/s", shown.getvalue())]
    assert rates == [pytest.approx(2 * 40 / 10, abs=1), pytest.approx(2 * (steps - 60) / 10, rel=0.1)]
    assert second.pack.id != first.pack.id
