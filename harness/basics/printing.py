"""Where text leaves the program: whatever it holds, a line stays a line, and a terminal obeys none of it.

Names, traces and descriptions come from results folders and configuration folders, which may be a stranger's.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
from typing import Any, TextIO

LONGEST_LABEL = 64  # characters of a name in a figure or a table
_KEPT = 55  # of a longer one, before the eight that tell it from others


def printable(text: str) -> str:
    r"""`text` on one line, with an escape such as \x1b or \u202e for each character that is not to be seen as itself.

    These are controls, line breaks, changes of direction, zero-width characters, and halves of surrogate pairs.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def label(text: str) -> str:
    """`printable`, and short enough for a figure or a table: equal texts stay equal, and different ones different."""
    line = printable(text)
    return line if len(line) <= LONGEST_LABEL else f"{line[:_KEPT]}~{hashlib.sha256(line.encode()).hexdigest()[:8]}"


def in_encoding(text: str, encoding: str | None) -> str:
    """`text` with escapes for what the encoding of a stream lacks."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def encodable(value: Any) -> Any:
    r"""JSON's `value` with an escape such as \ud800 for each half of a surrogate pair in it, which no UTF-8 has.

    pandas keeps texts as UTF-8 where pyarrow is installed.
    """
    if isinstance(value, str):
        return value if value.isascii() else in_encoding(value, "utf-8")
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(name): encodable(item) for name, item in value.items()}
    return value


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print each of these as one line, to standard output if no other file is given."""
    file = file or sys.stdout
    for line in lines:
        print(in_encoding(printable(line), file.encoding), file=file)


def complain(*lines: str) -> None:
    """`say` on standard error. Where nobody can read that, the exit status has to do."""
    with contextlib.suppress(OSError):
        say(*lines, file=sys.stderr)


def warn_in_one_line() -> None:
    """From now on a warning is one line on standard error, without the place in the code."""
    warnings.formatwarning = lambda message, *place, **others: f"warning: {printable(str(message))}\n"


def count(number: int, noun: str) -> str:
    """`1 pack`, `2 packs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """`90 s`, `12 min`, `3.5 h`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def sentence(text: str) -> str:
    """A line of a list of commands, as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."
