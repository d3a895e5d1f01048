"""Files beside the store that are damaged, or no files at all: a line that names each, and nothing else is lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import analysis.__main__
from analysis.reading.searches import JOURNAL
from harness.storage.progress_files import ERRORS, PLAN, PROGRESS
from sweeps.running.ledger import LOCKS
from tests.sweeps import command

SEARCH = ("search=max_stable_lr", "optim.lr=interval(1e-3,1e-1)", "search.trials=2")
DEEP = b"[" * 100_000
DAMAGES: dict[str, Callable[[Path], object]] = {
    "binary": lambda path: path.write_bytes(b"\x00\xff\xfe\x1b[2J\n"),
    "empty object": lambda path: path.write_bytes(b"{}\n"),
    "another type": lambda path: path.write_bytes(b'{"trials": 5, "begun": "x", "steps": [], "op_code": "x"}\n'),
    "a list": lambda path: path.write_bytes(b"[1, 2]\n"),
    "too deep": lambda path: path.write_bytes(DEEP + b"\n"),
    "huge number": lambda path: path.write_bytes(
        b'{"begun": 0, "steps": 1, "frozen": 0, "of": 1%s, "trials": 1%s, "op_code": 1%s}\n' % ((b"0" * 400,) * 3)
    ),
    "enormous": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to("/etc/hostname"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished search."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert command.call(*command.tiny(*SEARCH, f"out={out}")).status == 0
    return out


@pytest.fixture
def done(finished: Path, empty: Path) -> Path:
    return Path(shutil.copytree(finished, empty / "out"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_status_names_what_it_leaves_out(done: Path, damage: str) -> None:
    good = {"begun": 0, "steps": 3, "of": 6, "trials": 4, "frozen": 0}
    for folder in (PROGRESS, ERRORS, LOCKS):
        (done / folder).mkdir(exist_ok=True)
    (done / PLAN).unlink()
    for file in (PLAN, f"{PROGRESS}/aaa.json", f"{ERRORS}/ccc.txt", f"{LOCKS}/bbb.lock"):
        DAMAGES[damage](done / file)
    (done / PROGRESS / "bbb.json").write_text(json.dumps(good))
    ended = command.call("status", "out")
    lines = ended.out.splitlines()
    assert (ended.status, ended.err) == (None, "")
    assert lines[0] == "out: 4 of 4 trials done"
    assert [line.partition(": ")[2].partition(": ")[0] for line in lines if line.startswith("left out: ")] == [
        "out/plan.json",
        "out/progress/aaa.json",
    ]
    assert "  bbb  step 3 of 6, 4 trials" in lines
    assert sum(line.startswith("  ccc  ") for line in lines) == 1
    assert all(line.isprintable() and len(line) < 400 for line in lines)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_one_line(done: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    """For a report, for a figure, and for the command that would go on searching, which leaves it as it is."""
    (done / JOURNAL).unlink()
    DAMAGES[damage](done / JOURNAL)
    before = os.lstat(done / JOURNAL)
    capsys.readouterr()
    for arguments in (["report", "out"], ["figure", "search_history", "out", "x.png"]):
        assert analysis.__main__.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith("error: out/search/journal.jsonl: damaged, "), captured.err
    ended = command.call(*command.tiny(*SEARCH, "out=out"))
    assert ended.status == 2 and ended.err.count("\n") == 1 and ended.out == ""
    assert ended.err.startswith(f"error: {done}/search/journal.jsonl: damaged, ")
    after = os.lstat(done / JOURNAL)
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def _changed(key: str, value: object) -> Callable[[dict], dict]:
    return lambda log: log | {key: value} if key in log else log


def _attribute(key: str, value: object) -> Callable[[dict], dict]:
    return lambda log: log | {"user_attr": {key: value}} if key in log.get("user_attr", ()) else log


@pytest.mark.parametrize(
    "change",
    [
        _changed("op_code", 99),
        _changed("values", ["x"]),
        _changed("values", [1.0, 2.0]),
        _changed("state", "done"),
        _changed("directions", [9]),
        _changed("datetime_start", 5),
        _attribute("cell", 5),
        _attribute("cell", ["deep", {}]),
        _attribute("objectives", "x"),
        _attribute("objectives", ["a", "b"]),
        _changed("distribution", "{}"),
    ],
)
def test_a_journal_whose_entries_are_wrong(
    done: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict], dict]
) -> None:
    logs = [json.loads(line) for line in (done / JOURNAL).read_bytes().splitlines()]
    changed = [change(log) for log in logs]
    assert changed != logs
    (done / JOURNAL).write_text("".join(f"{json.dumps(log)}\n" for log in changed))
    capsys.readouterr()
    assert analysis.__main__.main(["figure", "search_history", "out", "x.png"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: out/search/journal.jsonl: damaged, "), err
