"""The `~` of a user's own folder: a shell leaves it alone behind `key=`, and Hydra's grammar knows no such sign.

It is kept as it was given, in a trial's configuration too, so that a trial's id tells neither who trained it nor where;
whoever opens the file expands it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_HOME = re.compile(r"(?<=[=,(])~[^,()]*")


def quoted(override: str) -> str:
    """The override with quotes around each value that begins with ~, for Hydra's grammar."""
    key, _, value = override.partition("=")
    if key.startswith("-") or "'" in value or '"' in value:
        return override
    return f"{key}{_HOME.sub(lambda match: repr(match[0]), override.removeprefix(key))}"


def with_homes(arguments: Sequence[str]) -> list[str]:
    """A command line as Hydra can read it, whose flags name folders in full."""
    parts = [(text, *text.partition("=")) for text in arguments]
    return [
        f"{key}={os.path.expanduser(value)}" if key.startswith("--") and is_given else quoted(text)
        for text, key, is_given, value in parts
    ]
