"""Commands as a user starts them: in another folder, and with no path that leads to this source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# One process for all, because torch takes seconds.
_CALL_ALL = """
import runpy, sys

program, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [program, *line.split()]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, line
"""


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints; it must succeed. `variables` are set in its environment, which has none of Python's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_all(program: Path, *lines: str, cwd: Path, python: str | Path = sys.executable) -> str:
    """What several command lines of an installed program print, one after the other; all of them must succeed."""
    return run(python, "-P", "-c", _CALL_ALL, program, *lines, cwd=cwd)
