"""Which harness made a store: its number, the commit of a checkout, and whether that was clean."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.basics.version import PROJECT, commit, provenance, version

COMMITTER = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]


def git(folder: Path, *words: str) -> str:
    words = ("git", "-C", str(folder), *COMMITTER, *words)
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone with one commit."""
    folder = tmp_path / "clone"
    (folder / "harness").mkdir(parents=True)
    (folder / "harness" / "loop.py").write_text("steps = 1\n")
    (folder / "notes.txt").write_text("mine\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "stability-harness"\nversion = "7.8.9"\n')
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_the_number_of_a_checkout_is_its_own(checkout: Path) -> None:
    assert version(checkout) == "7.8.9"
    (checkout / "pyproject.toml").write_text("not [ TOML")
    assert version(checkout) == version(checkout / "nowhere") != "7.8.9", "what is installed"


def test_the_commit_and_whether_a_source_differs_from_it(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert commit(checkout) == head
    (checkout / "notes.txt").write_text("changed\n")
    (checkout / "results").mkdir()
    commit.cache_clear()
    assert commit(checkout) == head, "no source"
    (checkout / "harness" / "mine.py").write_text("")  # what is not added yet counts
    commit.cache_clear()
    assert commit(checkout) == f"{head}-dirty"
    (checkout / "harness" / "mine.py").unlink()
    (checkout / "harness" / "loop.py").write_text("steps = 2\n")
    commit.cache_clear()
    assert commit(checkout) == f"{head}-dirty"


def test_a_repository_around_it_is_another(checkout: Path) -> None:
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert commit(inside) is None


def test_what_a_shell_says_of_another_repository_is_not_heard(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkout, checkout.parent / "other")
    git(checkout.parent / "other", "commit", "--quiet", "--allow-empty", "--message", "second")
    monkeypatch.setenv("GIT_DIR", str(checkout.parent / "other" / ".git"))
    found = commit(checkout)
    monkeypatch.delenv("GIT_DIR")
    assert found == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("script", [None, "exit 3", "echo nonsense", "exec sleep 600"])
def test_without_an_answer_there_is_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    """No git, one that fails, one that says something else, and one that hangs."""
    tools = checkout.parent / "tools"
    tools.mkdir()
    if script:
        (tools / "git").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin" if script else str(tools))
    assert commit(checkout, seconds=0.5) is None


def test_before_the_first_commit_there_is_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert commit(tmp_path) is None


def test_git_is_asked_once(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = commit(checkout)
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) == head is not None


def test_what_is_stored() -> None:
    found = provenance()
    assert found["harness"] == version(PROJECT)
    assert found.get("commit") == commit()
