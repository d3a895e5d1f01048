"""`stability-harness retry OUT`: the command that trained a folder once more, for what has failed or is missing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from harness.config import ConfigError
from harness.storage.progress_files import read_asked
from harness.storage.records import Missing, Unreadable
from harness.storage.stored import read_root
from sweeps.compose.overrides import out_word


def words_again(out: Path, more: Sequence[str]) -> list[str]:
    """The words of the last command that trained into `out`, and more. Raises ConfigError where they are not known.

    Options of a launcher are not kept, so they are for `more`.
    """
    read_root(out)
    try:
        words = read_asked(out).words
    except Missing:
        words = None
    except Unreadable as error:
        raise ConfigError(f"{error}; allowed: the command that trained it") from None
    if words is None:
        reason = "does not say by which command it was trained, as a folder of an earlier version"
        raise ConfigError(f"out={out}: {reason}; allowed: that command once more, which trains what is missing")
    kept = [word for word in words if not word.startswith("out=")]
    return [*kept, out_word(os.path.abspath(out)), *more]
