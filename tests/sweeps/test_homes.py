"""`~` behind `key=`, which a shell leaves alone: the user's own folder, wherever a file or a folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.reading.open_sweep import open_sweep
from sweeps.compose.overrides import quoted, with_homes
from tests.sweeps import command


@pytest.fixture
def home(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder, with two texts in it."""
    monkeypatch.setenv("HOME", str(empty / "home"))
    for number, name in enumerate(("books", "my books")):
        folder = empty / "home" / name
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(f"{number} words and more of them " * 99)
    return empty / "home"


TEXT = ("data.source=text", "data.vocabulary=256")


def test_as_documented(home: Path) -> None:
    ended = command.call(*command.tiny(*TEXT, "data.path=~/books,~/my books", "out=~/results/two"))
    assert (ended.status, ended.err) == (0, "")
    assert "trained 2 of 2 trials" in ended.out and f"results in {home}/results/two" in ended.out
    sweep = open_sweep(home / "results" / "two")
    assert sorted(sweep["path"].values.tolist()) == ["~/books", "~/my books"]
    assert not (home.parent / "~").exists()


def test_an_id_knows_the_path_as_it_was_given() -> None:
    """So that it does not tell whose folder it was, and that of a whole path stays what it was."""
    own, whole = (command.only(*TEXT, f"data.path={path}") for path in ("~/books", "/books"))
    assert (own.data.path, whole.data.path) == ("~/books", "/books")
    assert own.id == command.only(*TEXT, "data.path='~/books'").id
    assert whole.id == "06308e1bf46725fc"


def test_in_a_study(home: Path) -> None:
    write = "data: {source: text}\nhydra: {sweeper: {params: {data.path: '~/books,~/my books'}}}"
    command.write_yaml(home / "conf", "study/mine.yaml", write)
    ended = command.call(*command.tiny("--config-dir=~/conf", "study=mine", "plan=true", *TEXT))
    assert (ended.status, ended.err) == (0, "") and "2 trials asked for" in ended.out


@pytest.mark.parametrize(
    ("key", "path", "words"),
    [
        ("data.path", "~/nothing", "data.path=~/nothing: no such file or folder"),
        ("data.path", "~nobody-of-this-name/x", "data.path=~nobody-of-this-name/x: no such file or folder"),
        ("fault.record", "~/nothing", "fault.record=~/nothing: no such file"),
        ("fault.record", "~/nothing:0123456789abcdef", "fault.record=~/nothing:0123456789abcdef: does not exist"),
    ],
)
def test_nothing_there(home: Path, key: str, path: str, words: str) -> None:
    others = TEXT if key == "data.path" else ("fault=replay",)
    (line,) = command.refused(home, *command.tiny(*others, f"{key}={path}"))
    assert line.startswith(f"error: {words}; allowed: ")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("data.path=~/books", "data.path='~/books'"),
        ("data.path=~/a,/b,~/c d", "data.path='~/a',/b,'~/c d'"),
        ("data.path=choice(~/a,~b/c)", "data.path=choice('~/a','~b/c')"),
        ("data.path='~/a,~/b'", "data.path='~/a,~/b'"),
        ("data.path=/a~b", "data.path=/a~b"),
        ("~model.width=3", "~model.width=3"),
        ("--help", "--help"),
    ],
)
def test_quotes_for_hydras_grammar(text: str, found: str) -> None:
    assert quoted(text) == found == quoted(found)


def test_flags_are_named_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert with_homes(["--config-dir=~/conf", "-m", "a=~"]) == ["--config-dir=/home/me/conf", "-m", "a='~'"]
