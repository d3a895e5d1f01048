"""Data that cannot serve, and places where no results can go, are one line that names them; nothing is written."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest

from harness.storage.store import open_store
from harness.storage.stored import FORMAT_VERSION
from tests.sealing import seal_values
from tests.sweeps import command

# --- data --------------------------------------------------------------------------------------------------------


def test_empty_text(empty: Path) -> None:
    (empty / "text").mkdir()
    (empty / "text" / "a.txt").touch()
    arguments = command.tiny("data.source=text", "data.vocabulary=256", "data.path=text")
    (line,) = command.refused(empty, *arguments)
    assert line.startswith("error: data.path=text: empty text; allowed: ")


def test_folder_without_text(empty: Path) -> None:
    (empty / "text").mkdir()
    arguments = command.tiny("data.source=text", "data.vocabulary=256", "data.path=text")
    (line,) = command.refused(empty, *arguments)
    assert line.startswith("error: data.path=text: no UTF-8 text in this folder; allowed: ")


def test_token_shard_of_odd_length(empty: Path) -> None:
    (empty / "shard.bin").write_bytes(b"\0" * 10_001)
    (line,) = command.refused(empty, *command.tiny("data.source=tokens", "data.path=shard.bin"))
    assert line.startswith("error: data.path=shard.bin: ")
    assert "10001 bytes long, an odd number; allowed: uint16 tokens" in line


def test_token_beyond_the_vocabulary(empty: Path) -> None:
    (empty / "shard.bin").write_bytes(struct.pack("<5000H", *[7] * 4999, 32))
    (line,) = command.refused(empty, *command.tiny("data.source=tokens", "data.path=shard.bin"))
    assert line.startswith("error: data.vocabulary=32: too small for token 32 in shard.bin")
    assert "; allowed: above the largest token, up to 65536" in line


# --- where results go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["plan=true", "plan=false"])
def test_results_of_another_study(empty: Path, plan: str) -> None:
    open_store(empty / "out", "quickstart")
    (line,) = command.refused(empty, *command.tiny("out=out", plan))
    assert line.startswith(f"error: out={empty}/out: holds results of study quickstart; allowed: ")


@pytest.mark.parametrize("plan", ["plan=true", "plan=false"])
def test_store_of_another_version(empty: Path, plan: str) -> None:
    open_store(empty / "out", "grid")
    file = empty / "out" / "store.zarr" / "zarr.json"
    root = json.loads(file.read_text())
    root["attributes"]["format"] = 99
    seal_values(file, root)
    (line,) = command.refused(empty, *command.tiny("out=out", plan))
    assert line.startswith(
        f"error: out={empty}/out: holds a store of format 99; allowed: format 4, 5, 6 or {FORMAT_VERSION}"
    )


def test_out_is_a_file(empty: Path) -> None:
    (empty / "out").write_text("precious")
    (line,) = command.refused(empty, *command.tiny("out=out"))
    assert line.startswith(f"error: out={empty}/out: is a file, or below one; allowed: a folder")


@pytest.mark.parametrize("out", ["/proc/sweep", "/proc/self/sweep"])
def test_no_write_permission(empty: Path, out: str) -> None:
    """Not even root can make a folder there."""
    (line,) = command.refused(empty, *command.tiny(f"out={out}"))
    assert line.startswith(f"error: out={out}: cannot be written to (")
    assert line.endswith("allowed: a writable folder")


def test_no_write_permission_for_a_user(empty: Path) -> None:
    (empty / "locked").mkdir(mode=0o555)
    with contextlib.ExitStack() as at_end:
        if os.geteuid() == 0:  # root may write everywhere: be somebody else for a while
            assert command.call(*command.tiny("out=open", "plan=true")).status == 0  # imports all that it needs
            closed = [folder for folder in (empty, *empty.parents) if folder.stat().st_mode & 0o055 != 0o055]
            for folder in closed:
                at_end.callback(folder.chmod, folder.stat().st_mode)
                folder.chmod(folder.stat().st_mode | 0o055)
            at_end.callback(os.seteuid, 0)
            os.seteuid(65534)
        (line,) = command.refused(empty, *command.tiny("out=locked/out"))
    assert line.startswith(f"error: out={empty}/locked/out: cannot be written to (Permission denied)")
