"""Which folders can become, or are, a results folder; what cannot is refused in one line and left as it is."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import zarr

from harness.config import ConfigError
from harness.storage.results_folder import MARKER
from harness.storage.store import open_store
from harness.storage.stored import FORMAT_VERSION, STORE, complete_trials, read_packs
from tests.harness.test_store import tree


def test_a_folder_is_made_ready_once(tmp_path: Path) -> None:
    first = open_store(tmp_path / "new" / "deeper", "study")
    before = tree(tmp_path)
    assert open_store(tmp_path / "new" / "deeper", "study").id == first.id
    assert tree(tmp_path) == before
    assert list(read_packs(tmp_path / "new" / "deeper")) == []


def other_study(out: Path) -> Path:
    open_store(out, "other")
    return out


def other_version(out: Path) -> Path:
    open_store(out, "study")
    (out / STORE / "zarr.json").write_text(json.dumps({"attributes": {"format": 99, "study": "study"}}))
    return out


def older_version(out: Path) -> Path:
    open_store(out, "study")
    (out / STORE / "zarr.json").write_text(json.dumps({"attributes": {"format": 4, "study": "study"}}))
    return out


def a_file(out: Path) -> Path:
    (out / "file").write_text("")
    return out / "file"


def below_a_file(out: Path) -> Path:
    return a_file(out) / "results"


def with_other_things(out: Path) -> Path:
    for name in ("thesis.tex", "data.csv", ".bashrc", "zebra"):
        (out / name).write_text("mine")
    return out


def foreign_store(out: Path) -> Path:
    zarr.open_group(out / STORE, mode="w")
    return out


def broken_store(out: Path) -> Path:
    open_store(out, "study")
    (out / STORE / "zarr.json").write_text("{")
    return out


def marker_of_another_version(out: Path) -> Path:
    (out / MARKER).write_text(json.dumps({"format": 2, "id": "0" * 32}))
    return out


def damaged_marker(out: Path) -> Path:
    (out / MARKER).write_text("[" * 100_000)
    return out


def empty_marker(out: Path) -> Path:
    (out / MARKER).touch()
    return out


def linked_marker(out: Path) -> Path:
    (out / "elsewhere").write_text(json.dumps({"format": 1, "id": "0" * 32}))
    (out / MARKER).symlink_to(out / "elsewhere")
    return out


def waiting_marker(out: Path) -> Path:
    os.mkfifo(out / MARKER)
    return out


@pytest.mark.parametrize(
    ("prepare", "got", "allowed"),
    [
        (other_study, "holds results of study other", "an empty or new folder, or study=other"),
        (other_version, "holds a store of format 99", f"format 4, 5, 6 or {FORMAT_VERSION}, or a new folder"),
        (
            older_version,
            "holds a store of format 4, which can be read but not added to",
            "a new folder, or one of format",
        ),
        (a_file, "is a file", "a folder"),
        (below_a_file, "below one", "a folder"),
        (with_other_things, "(.bashrc, data.csv, thesis.tex and 1 more)", "a new or empty folder, such as out=/"),
        (foreign_store, "(store.zarr) and no results folder", "a new or empty folder"),
        (broken_store, "cannot be read", "another folder"),
        (marker_of_another_version, "is a folder of format 2", "format 1"),
        (damaged_marker, "cannot be read", "a whole one"),
        (empty_marker, "cannot be read", "a whole one"),
        (linked_marker, "is a link to", "files and folders as a sweep makes them"),
        (waiting_marker, "is not what belongs there", "files and folders as a sweep makes them"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, prepare, got: str, allowed: str) -> None:
    out = prepare(tmp_path)
    before = sorted(map(str, tmp_path.rglob("*"))), tree(tmp_path)
    with pytest.raises(ConfigError) as caught:
        open_store(out, "study")
    message = str(caught.value)
    assert message.startswith(f"out={out}: ") and got in message and f"; allowed: {allowed}" in message
    assert "\n" not in message
    assert (sorted(map(str, tmp_path.rglob("*"))), tree(tmp_path)) == before


def test_no_write_permission_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"out=.*cannot be written to \(Permission denied\); allowed: a writable"):
        open_store(tmp_path / "new" / "deeper", "study")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that even root cannot write to")
def test_root_too_may_lack_the_permission() -> None:
    with pytest.raises(ConfigError, match="cannot be written to"):
        open_store(Path("/proc/self/new"), "study")


def test_a_folder_without_results_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist|holds no results"):
        list(read_packs(tmp_path))
    with pytest.raises(ConfigError, match="does not exist|holds no results"):
        complete_trials(tmp_path / "missing")
