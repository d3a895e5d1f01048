"""Which version of the harness this is: its number, and the commit if it runs from a checkout."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import tomllib
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
NAME = "stability-harness"
SOURCES = ("harness", "injectors", "sweeps", "analysis", "hydra_plugins")
SECONDS = 5.0  # for git to answer


def version(project: Path = PROJECT) -> str:
    """The number: a checkout's own, whatever else is installed; `unknown` if nobody says."""
    try:
        described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        if described["name"] == NAME:
            number: str = described["version"]
            return number
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no checkout
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@cache
def commit(project: Path = PROJECT, seconds: float = SECONDS) -> str | None:
    """The commit of the checkout that this package stands in, `-dirty` after it if a source file differs from it.

    None where there is no checkout, or no git that answers. Git is asked once a process.
    """
    if not (project / ".git").exists():  # or git would answer for a repository around it
        return None
    ask = ["git", "--no-optional-locks", "-C", str(project), "status", "--porcelain=v2", "--branch"]
    ask += ["--", *(name for name in SOURCES if (project / name).is_dir())]
    # What a hook or a shell has set would have git look elsewhere.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            ask, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds, env=environment
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.splitlines()
    number = next((line.removeprefix("# branch.oid ") for line in lines if line.startswith("# branch.oid ")), "")
    if answer.returncode or not number.isalnum():  # before the first commit it is `(initial)`
        return None
    return f"{number}-dirty" if any(not line.startswith("#") for line in lines) else number


def provenance() -> dict[str, str]:
    """What is stored with results: `harness`, and `commit` if there is one."""
    number = commit()
    return {"harness": version(), **({"commit": number} if number else {})}


def version_line() -> str:
    """The version, and the commit of a checkout."""
    number = commit()
    return f"{NAME} {version()}{f' ({number})' if number else ''}"
