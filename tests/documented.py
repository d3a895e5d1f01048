"""The command lines of a page of documentation, read by a shell as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

PROGRAM = "stability-harness"
# Stands for the program: writes down its words, each with a zero byte after it.
STAND_IN = """#!/bin/sh
printf '%s\\0' "$@" > "$WORDS"
"""


def commands(text: str, name: str = "") -> list[str]:
    """The lines of its code blocks that begin with our command, or with that one of its commands, as they stand."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    return [line for line in lines if line.startswith(f"{PROGRAM} {name}".strip())]


def words_of(line: str, home: Path) -> list[str]:
    """What the program is given when the line is typed in the folder `home`, which is the user's home, too."""
    folder, words = home / ".bin", home / ".words"
    folder.mkdir(exist_ok=True)
    (folder / PROGRAM).write_text(STAND_IN)
    (folder / PROGRAM).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "WORDS": str(words), "HOME": str(home)}
    subprocess.run(["bash", "-c", line], cwd=home, env=environment, check=True)
    return words.read_text().split("\0")[:-1]
