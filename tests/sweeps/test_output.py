"""Standard output that takes no more: a reader that has gone ends a command quietly, a full disk is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.reading.open_sweep import open_sweep
from tests.sweeps import command

BIN = Path(sys.executable).parent
HARNESS, ANALYSIS = [BIN / "stability-harness"], [sys.executable, "-m", "analysis"]
CLOSED_PIPE = 141  # what a shell says of a program that SIGPIPE has ended
PRINTING = [
    [*HARNESS, "list"],
    [*HARNESS, "sweep", "--help"],
    [*ANALYSIS, "--help"],
]
OF_RESULTS = [
    [*HARNESS, "status", "out"],
    [*HARNESS, "export", "out", "--to", "csv"],
    [*ANALYSIS, "incidents", "out"],
]


def names(words: list) -> str:
    return "_".join(Path(word).name for word in map(str, words))


def to_closed_pipe(words: list, folder: Path) -> tuple[int, str]:
    """The exit status of a command whose reader has gone before its first word, and what is on standard error."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=folder)
    finally:
        os.close(writing)
    return done.returncode, done.stderr


def to_full_disk(words: list, folder: Path) -> tuple[int, str]:
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder)
    return done.returncode, done.stderr


def check_both(words: list, folder: Path) -> None:
    assert to_closed_pipe(words, folder) == (CLOSED_PIPE, "")
    status, said = to_full_disk(words, folder)
    assert status == 2
    assert said == "error: standard output: No space left on device; allowed: a file or a pipe that can be written\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    faults = ["fault=nan_gradient", "fault.start=2", "playbook=none,rerun"]
    assert command.call(*command.tiny(f"out={folder / 'out'}", *faults)).status == 0
    return folder


@pytest.mark.parametrize("words", PRINTING, ids=names)
def test_commands_that_print(words: list, empty: Path) -> None:
    check_both(words, empty)


@pytest.mark.parametrize("words", OF_RESULTS, ids=names)
def test_commands_on_results(words: list, results: Path) -> None:
    check_both(words, results)


def test_a_sweep_goes_on_after_its_reader_has_gone(empty: Path) -> None:
    line = [*HARNESS, "sweep", *command.tiny("out=out", "seed=range(2)")]
    assert to_closed_pipe(line, empty) == (CLOSED_PIPE, "")
    assert subprocess.run(line, capture_output=True, cwd=empty).returncode == 0
    assert open_sweep(empty / "out").complete.values.tolist() == [True, True]


def test_wrong_words_that_nobody_can_read_have_their_status(empty: Path) -> None:
    with open("/dev/full", "w") as full:
        line = [*HARNESS, "report", "nowhere"]
        assert subprocess.run(line, stdout=subprocess.PIPE, stderr=full, cwd=empty).returncode == 2


def test_no_standard_output_at_all(empty: Path) -> None:
    """As after `>&-`."""
    done = subprocess.run(["bash", "-c", f"{HARNESS[0]} list >&-"], capture_output=True, text=True, cwd=empty)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
