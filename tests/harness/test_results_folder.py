"""A results folder: only one of ours is written to, files appear whole, no link is followed, a move is noticed."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import ConfigError
from harness.storage.results_folder import MARKER, FolderLost, LinkRefused, ResultsPath


@pytest.fixture
def folder(tmp_path: Path) -> ResultsPath:
    return ResultsPath.make(tmp_path / "out")


# --- whose it is -------------------------------------------------------------------------------------------------


def test_those_who_make_it_at_once_agree_on_its_id(tmp_path: Path) -> None:
    made: list[str] = []
    together = threading.Barrier(8)

    def make() -> None:
        together.wait()
        made.append(ResultsPath.make(tmp_path / "a" / "b").id)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8 and len(set(made)) == 1
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [MARKER]
    marker = json.loads((tmp_path / "a" / "b" / MARKER).read_text())
    assert {name: marker[name] for name in ("format", "id")} == {"format": 1, "id": made[0]}


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "scratch")
    (ResultsPath.make(tmp_path / "results") / "file").write(b"x")
    assert (tmp_path / "scratch" / "file").read_bytes() == b"x"


def test_it_travels_to_other_processes(folder: ResultsPath) -> None:
    (pickle.loads(pickle.dumps(folder)) / "file").write(b"x")
    assert (folder / "file").read_bytes() == b"x"


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_synced", [True, False])
def test_the_old_file_is_there_until_the_new_one_is_whole(folder: ResultsPath, is_synced: bool) -> None:
    file = folder / "file"
    file.write(b"old")
    with file.whole_file(is_synced) as aside:
        aside.write_text("ne")
        assert file.read_bytes() == b"old"
        assert len(folder.entries()) == 3 and folder.entries()[0].name.startswith(".file.")
        aside.write_text("new")
    assert file.read_bytes() == b"new" and [entry.name for entry in folder.entries()] == ["file", MARKER]


@pytest.mark.parametrize("is_synced", [True, False])
def test_an_error_leaves_the_old_file_and_nothing_else(folder: ResultsPath, is_synced: bool) -> None:
    file = folder / "file"
    file.write(b"old")
    with pytest.raises(KeyboardInterrupt), file.whole_file(is_synced) as aside:
        aside.write_text("ne")
        raise KeyboardInterrupt
    assert file.read_bytes() == b"old" and [entry.name for entry in folder.entries()] == ["file", MARKER]


def test_more_is_not_read_than_allowed(folder: ResultsPath) -> None:
    (folder / "file").write(b"1234")
    assert (folder / "file").read_bytes(most=4) == b"1234"
    with pytest.raises(OSError, match="4 bytes; at most 3 are read"):
        (folder / "file").read_bytes(most=3)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0"])
def test_a_name_leads_nowhere_else(folder: ResultsPath, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a file"):
        folder / name


def test_it_is_no_path_by_accident(folder: ResultsPath) -> None:
    with pytest.raises(TypeError, match="reached only through"):
        os.stat(folder / "file")  # type: ignore[call-overload]


# --- links -------------------------------------------------------------------------------------------------------

ACCESSES: dict[str, Callable[[ResultsPath], object]] = {
    "write": lambda place: (place / "victim").write(b"attacked"),
    "write deeper": lambda place: (place / "inner" / "victim").write(b"attacked"),
    "library": lambda place: write_by_library(place / "victim"),
    "truncate": lambda place: os.ftruncate((place / "victim").descriptor(os.O_RDWR | os.O_CREAT), 0),
    "folder": lambda place: (place / "new").make_folder(),
    "unlink": lambda place: (place / "victim").unlink(),
    "tree": lambda place: (place / "inner").remove_tree(),
    "rename": lambda place: (place / "victim").rename("renamed"),
    "list": lambda place: place.entries(),
    "read": lambda place: (place / "victim").read_bytes(),
}


def write_by_library(place: ResultsPath) -> None:
    with place.whole_file(is_synced=False) as path:
        path.write_text("attacked")


def seen(folder: Path) -> dict[str, object]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("access", ACCESSES.values(), ids=list(ACCESSES))
def test_nothing_is_done_through_a_linked_folder(folder: ResultsPath, tmp_path: Path, access: Callable) -> None:
    victims = tmp_path / "victims"
    (victims / "inner").mkdir(parents=True)
    (victims / "victim").write_text("mine")
    (victims / "inner" / "victim").write_text("mine")
    (folder.path / "store").symlink_to(victims)
    before = seen(tmp_path)
    with pytest.raises(LinkRefused, match=r"its store is a link to .*victims; allowed: files and folders"):
        access(folder / "store")
    assert seen(tmp_path) == before


def test_nothing_is_done_through_a_linked_file(folder: ResultsPath, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file = folder / "file"
    for change in (lambda: file.write(b"x"), lambda: write_by_library(file), file.unlink, file.remove_tree):
        if not file.path.is_symlink():
            file.path.unlink(missing_ok=True)
            file.path.symlink_to(victim)
        change()  # replaces or removes the link itself
        assert victim.read_text() == "mine"
    file.path.unlink(missing_ok=True)
    file.path.symlink_to(victim)
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
        with pytest.raises(LinkRefused, match=r"its file is a link to .*victim"):
            file.descriptor(flags)
    assert victim.read_text() == "mine"


def test_a_tree_is_removed_without_what_it_links_to(folder: ResultsPath, tmp_path: Path) -> None:
    (tmp_path / "victims").mkdir()
    (tmp_path / "victims" / "file").write_text("mine")
    (folder / "tree").make_folder()
    (folder / "tree" / "file").write(b"x")
    (folder.path / "tree" / "link").symlink_to(tmp_path / "victims")
    (folder / "tree").remove_tree()
    assert not (folder / "tree").exists() and (tmp_path / "victims" / "file").read_text() == "mine"


def test_a_pipe_is_not_waited_for(folder: ResultsPath) -> None:
    os.mkfifo(folder.path / "pipe")
    with pytest.raises(LinkRefused, match="its pipe is not what belongs there"):
        (folder / "pipe").read_bytes()


# --- moved -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_folder_that_was_moved_is_noticed_and_not_made_again(
    folder: ResultsPath, tmp_path: Path, is_replaced: bool
) -> None:
    (folder / "progress").make_folder()
    folder.path.rename(tmp_path / "moved")
    if is_replaced:
        ResultsPath.make(folder.path)
    before = seen(tmp_path)
    for access in ("write", "write deeper", "library", "folder", "list", "read"):
        with pytest.raises(FolderLost, match=r"out=.*/out: was moved or removed meanwhile"):
            ACCESSES[access](folder / "progress")
    assert seen(tmp_path) == before
    assert ResultsPath.open(tmp_path / "moved").id == folder.id


def test_what_is_no_results_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reasons = {"": "holds no results", "missing": "does not exist", "file": "is no folder"}
    for out, reason in ((tmp_path / name, reason) for name, reason in reasons.items()):
        with pytest.raises(ConfigError, match=f"{reason}; allowed: a folder that a sweep has written"):
            ResultsPath.open(out)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
