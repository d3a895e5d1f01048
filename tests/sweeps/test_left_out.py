"""A sweep says which files are left out of its text, and so does its report."""

from __future__ import annotations

import json
from pathlib import Path

from analysis.reading.open_sweep import open_sweep
from analysis.reports.report import write_report
from harness.config import Data, Trial
from tests.harness.texts import write, write_prose
from tests.sweeps import command

OF_TEXT = ("data.source=text", "data.vocabulary=256", "data.path=books", "out=out")


def test_what_is_left_out_is_said_and_stored(empty: Path) -> None:
    write(write_prose(empty / "books"), {"notes.txt": b"\xff\xfe"})
    said = "data.path=books: 1 file left out, 2 of "
    planned = command.call(*command.tiny(*OF_TEXT, "plan=true"))
    assert planned.status == 0 and said in planned.out and not (empty / "out").exists()
    done = command.call(*command.tiny(*OF_TEXT))
    assert done.status == 0 and done.out.count(said) == 1
    (corpus,) = json.loads(open_sweep(empty / "out").attrs["corpus"])
    assert corpus["left_out"] == {"files": 1, "bytes": 2, "first": "notes.txt", "why": "byte 0 is no UTF-8"}
    report = write_report(empty / "out")
    line = "Left out of data.path=books: files: 1, bytes: 2, the first: notes.txt (byte 0 is no UTF-8)."
    assert line in report.findings and "notes.txt (byte 0 is no UTF-8)" in report.html.read_text()


def test_a_search_says_it_once(empty: Path) -> None:
    write(write_prose(empty / "books"), {"notes.txt": b"\xff\xfe"})
    searched = ("search=max_stable_lr", "optim.lr=tag(log,interval(1e-3,1))", "search.tolerance=10")
    done = command.call(*command.tiny(*OF_TEXT, *searched))
    assert done.status == 0 and done.out.count("1 file left out") == 1 and "round 2" in done.out


def test_much_is_refused_and_nothing_is_written(empty: Path) -> None:
    write(write_prose(empty / "books"), {"large.txt": b"\xff" * 100_000})
    (line,) = command.refused(empty, *command.tiny(*OF_TEXT))
    assert "1 file left out, 100,000 of " in line and line.endswith("or data.skip_bad=true to train on the rest")
    done = command.call(*command.tiny(*OF_TEXT, "data.skip_bad=true"))
    assert done.status == 0 and "data.path=books: 1 file left out, 100,000 of " in done.out


def test_results_of_both_kinds_are_read_together(empty: Path) -> None:
    """A trial does not store the younger keys where they are at their defaults."""
    assert Trial(data=Data()).to_dict()["data"].keys().isdisjoint({"skip_bad", "token_type"})
    write_prose(empty / "books")
    assert command.call(*command.tiny(*OF_TEXT, "data.skip_bad=false,true")).status == 0
    assert sorted(open_sweep(empty / "out").skip_bad.values) == [False, True]
