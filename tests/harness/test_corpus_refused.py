"""Files that are no text and no tokens, or have no end: one line, at once, before anything is trained."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from harness.config import ConfigError, Data
from harness.data.corpus import check_data, load_corpus
from tests.harness.texts import CONTEXT, llmc, raw, shards, text, write, write_prose

pytestmark = pytest.mark.usefixtures("own_cache")
COUNT = np.arange(1000)
HEADER = 1024  # bytes, in front of llm.c's tokens


def refused(data: Data) -> str:
    """The one line with which the data are refused, by the check and by those who read them."""
    lines = set()
    for act in (check_data, load_corpus):
        with pytest.raises(ConfigError) as caught:
            act(data, CONTEXT)
        (line,) = caught.value.reasons
        lines.add(line)
    (line,) = lines
    assert "\n" not in line and "; allowed: " in line
    return line


@pytest.mark.parametrize("kind", [text, shards], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fifo", "neither a file nor a folder"),
        ("socket", "neither a file nor a folder"),
        ("/dev/zero", "neither a file nor a folder"),
        ("/dev/null", "neither a file nor a folder"),
        ("a" * 300, "cannot be read (File name too long)"),
        ("a/" * 5000, "cannot be read (File name too long)"),
        ("a\0b", "no name of a file (embedded null byte)"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("dangling", "no such file or folder"),
        ("file/below", "no such file or folder"),
        ("~nobody-of-this-name/books", "no such file or folder"),
    ],
)
def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        assert f": {words}; allowed: a file or a folder" in refused(Data(**{**vars(kind(tmp_path)), "path": name}))


def test_a_folder_with_such_things_in_it_is_read_without_them(tmp_path: Path) -> None:
    write_prose(tmp_path)
    before = load_corpus(text(tmp_path), CONTEXT).fingerprint
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "cycle").symlink_to(tmp_path)
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    assert load_corpus(text(tmp_path), CONTEXT).fingerprint == before


@pytest.mark.parametrize("name", ["prose.txt", "."])
def test_text_that_no_memory_holds(tmp_path: Path, name: str) -> None:
    """A file with a hole, which takes no room on the disk."""
    write(tmp_path, {"prose.txt": "words " * 2000})
    with open(tmp_path / "prose.txt", "r+b") as file:
        file.truncate(1 << 43)
    line = refused(text(tmp_path / name))
    assert "takes about 40,960 GiB of memory; allowed: at most the " in line


def test_tokens_that_no_memory_holds(tmp_path: Path) -> None:
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(1 << 43)
    assert "takes about 16,384 GiB of memory; allowed: at most the " in refused(shards(tmp_path))


def test_random_tokens_that_no_memory_holds() -> None:
    assert "data.length=100000000000: takes about 373 GiB" in refused(Data(source="zipf", length=10**11))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (llmc(COUNT, count=-1)[: HEADER - 2], "for -1 tokens, but is 1022 bytes long"),
        (llmc([], count=-(2**31)), "for -2147483648 tokens, but is 1024 bytes long"),
        (llmc(COUNT, count=2**31 - 1), "for 2147483647 tokens, but is 3024 bytes long"),
        (llmc(COUNT, count=999), "for 999 tokens, but is 3024 bytes long"),
        (llmc(COUNT)[:12], "for 1000 tokens, but is 12 bytes long"),
        (llmc(COUNT, version=-1), "header of version -1 for 1000 tokens"),
        (raw(COUNT) + b"!", "is 2001 bytes long, an odd number"),
    ],
)
def test_a_shard_whose_header_is_wrong(tmp_path: Path, content: bytes, words: str) -> None:
    write(tmp_path, {"train.bin": content})
    assert words in refused(shards(tmp_path))


def test_a_name_in_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the ~ of data.path=~/books alone."""
    write_prose(tmp_path / "books")
    monkeypatch.setenv("HOME", str(tmp_path))
    here = Data(source="text", path="~/books")
    check_data(here, CONTEXT)
    assert load_corpus(here, CONTEXT).fingerprint == load_corpus(text(tmp_path / "books"), CONTEXT).fingerprint


def test_random_tokens_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(source="zipf", length=10_000, vocabulary=300)
    whole = load_corpus(data, CONTEXT).fingerprint
    monkeypatch.setattr("harness.data.corpus.DRAWN_AT_ONCE", 999)
    assert load_corpus(data, CONTEXT).fingerprint == whole == "93f5dad940db4d4034da4bb244dd5d94"
