"""Files that are left out of the data: counted, named, kept with the results, and too many of them refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.config import ConfigError, Data
from harness.data.corpus import check_data, load_corpus
from tests.harness.texts import CONTEXT, prose, raw, shards, text, write, write_prose

pytestmark = pytest.mark.usefixtures("own_cache")
SMALL = {f"{n}.txt": "good text, " * 50 for n in "abc"} | {f"{n}.txt": f"{n} " * 400 for n in "def"}
LARGE = "a long text " * 4000


def left_out(data: Data) -> dict:
    return load_corpus(data, CONTEXT).description["left_out"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (LARGE.encode() + b"\xff", f"byte {len(LARGE)} is no UTF-8"),
        (b"\xe9t\xe9 " + LARGE.encode(), "byte 0 is no UTF-8"),
        (LARGE.encode() + b"\0", f"byte {len(LARGE)} is NUL"),
        (b"abc\0" + LARGE.encode(), "byte 3 is NUL"),
    ],
    ids=["one_bad_byte", "latin_1", "trailing_nul", "early_nul"],
)
@pytest.mark.parametrize("act", [check_data, load_corpus])
def test_much_that_is_no_text_is_refused(tmp_path: Path, bad: bytes, why: str, act) -> None:
    write(tmp_path, {**SMALL, "large.txt": bad})
    read = sum(map(len, SMALL.values()))
    with pytest.raises(ConfigError) as caught:
        act(text(tmp_path), CONTEXT)
    (line,) = caught.value.reasons
    said = f"1 file left out, {len(bad):,} of {len(bad) + read:,} bytes; the first: large.txt ({why})"
    allowed = "UTF-8 text without NUL bytes, or data.skip_bad=true to train on the rest"
    assert line == f"data.path={tmp_path}: {said}; allowed: {allowed}"


def test_it_is_trained_without_where_that_is_asked_for(tmp_path: Path) -> None:
    bad = LARGE.encode() + b"\xff"
    before = load_corpus(text(write(tmp_path / "good", SMALL)), CONTEXT)
    data = text(write(tmp_path / "bad", {**SMALL, "large.txt": bad}), skip_bad=True)
    assert load_corpus(data, CONTEXT).fingerprint == before.fingerprint and "left_out" not in before.description
    why = f"byte {len(LARGE)} is no UTF-8"
    assert left_out(data) == {"files": 1, "bytes": len(bad), "first": "large.txt", "why": why}


def test_a_little_is_said_and_kept(tmp_path: Path) -> None:
    write_prose(tmp_path)
    assert (
        check_data(text(tmp_path), CONTEXT) == "" and "left_out" not in load_corpus(text(tmp_path), CONTEXT).description
    )
    write(tmp_path, {"picture.png": b"\x89PNG\0", "z.txt": b"\xff"})
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.*"))
    said = f"2 files left out, 6 of {size:,} bytes; the first: picture.png (byte 4 is NUL)"
    assert check_data(text(tmp_path), CONTEXT) == f"data.path={tmp_path}: {said}"
    assert left_out(text(tmp_path)) == {"files": 2, "bytes": 6, "first": "picture.png", "why": "byte 4 is NUL"}


def test_what_is_hidden_is_nobodys_text(tmp_path: Path) -> None:
    write_prose(tmp_path)
    write(tmp_path, {".git/x": b"\0" * 10**6, "__pycache__/y": b"\0" * 10**6})
    assert check_data(text(tmp_path), CONTEXT) == ""


@pytest.mark.parametrize("kind", [text, shards], ids=["text", "tokens"])
def test_links_to_folders(tmp_path: Path, kind) -> None:
    """Whole libraries could stand behind one."""
    write_prose(tmp_path / "elsewhere")
    here = write(tmp_path / "here", {"a.txt": prose(1) * 9} if kind is text else {"a.bin": raw(np.arange(999))})
    (here / "books").symlink_to(tmp_path / "elsewhere")
    (here / "gone.txt").symlink_to("nowhere")
    said = check_data(kind(here), CONTEXT)
    assert said.startswith(f"data.path={here}: 2 files left out, 0 of ")
    assert said.endswith("; the first: books (a link to a folder)")
    assert left_out(kind(here))["files"] == 2


def test_files_beside_token_shards(tmp_path: Path) -> None:
    write(tmp_path, {"0.bin": raw(np.arange(999)), "1.bin.gz": b"12345", "tokenizer.json": "{}"})
    said = "2 files left out, 7 of 2,005 bytes; the first: 1.bin.gz (no *.bin or *.npy)"
    assert check_data(shards(tmp_path), CONTEXT) == f"data.path={tmp_path}: {said}"
    assert left_out(shards(tmp_path))["bytes"] == 7


def test_a_name_cannot_break_the_line(tmp_path: Path) -> None:
    write(tmp_path, {**SMALL, "a\n\x1b[31m.txt": b"\xff"})
    assert check_data(text(tmp_path), CONTEXT).endswith(r"the first: a\n\x1b[31m.txt (byte 0 is no UTF-8)")
