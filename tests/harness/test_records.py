"""What a file of a results folder is checked for before anything is made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.storage.records import Missing, Unreadable, read_bytes, read_lines, read_record


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Kind:
    steps: int
    rate: float
    names: tuple[str, ...] = ()
    inner: Inner | None = None
    values: dict[str, float | str] | None = None
    is_done: bool = False

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError("steps is negative")


GOOD = {"steps": 3, "rate": 1, "names": ["a"], "inner": {"name": "b"}, "values": {"x": 1, "y": "z"}, "later": [1]}


def test_a_good_record(tmp_path: Path) -> None:
    file = tmp_path / "good.json"
    file.write_text(json.dumps(GOOD))
    assert read_record(file, Kind) == Kind(3, 1.0, ("a",), Inner("b"), {"x": 1.0, "y": "z"})
    file.write_text('{"steps": 0, "rate": 0.5}')
    assert read_record(file, Kind) == Kind(0, 0.5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe\x00\x80", "is not JSON"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"a":' * 100_000, "nests too deeply"),
        (b"9" * 5000, "is not JSON"),
        (b"[]", "it is a list, not an object with keys"),
        (b"{}", "steps is missing"),
        (b'{"steps": 1}', "rate is missing"),
        (b'{"steps": "1", "rate": 1}', "steps is '1', not an integer"),
        (b'{"steps": 1.0, "rate": 1}', "steps is 1.0, not an integer"),
        (b'{"steps": true, "rate": 1}', "steps is True, not an integer"),
        (b'{"steps": 99999999999999999999, "rate": 1}', "steps is beyond 64 bits"),
        (b'{"steps": 1, "rate": 99999999999999999999}', "rate is beyond 64 bits"),
        (b'{"steps": -1, "rate": 1}', "steps is negative"),
        (b'{"steps": 1, "rate": null}', "rate is None, not a number"),
        (b'{"steps": 1, "rate": 1, "names": "ab"}', "names is 'ab', not a list"),
        (b'{"steps": 1, "rate": 1, "names": ["a", {}]}', "names[1] is an object, not text"),
        (b'{"steps": 1, "rate": 1, "inner": {"name": 5}}', "inner.name is 5, not text"),
        (b'{"steps": 1, "rate": 1, "values": {"x": []}}', "values['x'] is a list, not text"),
        (b'{"steps": "' + b"x" * 9000 + b'", "rate": 1}', "steps is 'xxxxxxxxx"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(Unreadable) as caught:
        read_record(file, Kind)
    assert not isinstance(caught.value, Missing)
    assert str(caught.value).startswith(f"{file}: {reason}") and len(caught.value.reason) < 120


PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "is no regular file"),
    "a folder": (Path.mkdir, "is no regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link"),
    "a link": (lambda path: path.symlink_to("/etc/passwd"), "is a symbolic link"),
    "too large": (lambda path: path.write_bytes(b" " * 1001), "has more than 1000 bytes"),
    "a hole": (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40), "has more than 1000 bytes"),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, place: str) -> None:
    make, reason = PLACES[place]
    make(tmp_path / "file")
    for read in (read_bytes, read_lines, lambda path, most: read_record(path, Kind, most)):
        with pytest.raises(Unreadable) as caught:
            read(tmp_path / "file", 1000)
        assert caught.value.reason == reason


def test_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file/none", "\0"):
        with pytest.raises(Missing):
            read_record(tmp_path / name, Kind)


def test_the_beginning_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_bytes(tmp_path / "file", 4, is_cut=True) == b"abcd"


def test_lines(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b'{"a": 1}\n{"b": 2}\n{"torn')
    assert read_lines(file) == [{"a": 1}, {"b": 2}]
    for content, reason in ((b'{"a": 1}\n{\n', "line 2 is not JSON"), (b"5\n", "line 1 is no JSON object")):
        file.write_bytes(content)
        with pytest.raises(Unreadable, match=reason):
            read_lines(file)
