"""Names and texts of a store, which are anybody's, as trackers and tables take them."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from harness.basics.printing import label, printable

LONGEST_TEXT = 500  # characters of a value; the least that a tracker takes
_LONGEST_KEY = 120
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def key(name: str) -> str:
    """A name that every tracker takes, and that is no path; one that is changed has eight letters to tell it by."""
    if _PLAIN.fullmatch(name) and ".." not in name and len(name) <= _LONGEST_KEY:
        return name
    clean = re.sub(r"[^A-Za-z0-9_\-]", "_", name)[:40]
    return f"_{clean}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


def sweep_name(folder: str, study: str, id: str) -> str:
    """Of the sweep in a results folder: the folder's name, the study where that is another, and the id's beginning."""
    names = dict.fromkeys(key(label(name)) for name in (folder, study) if name)
    return f"{'-'.join(names) or 'sweep'}-{id[:8]}"


def is_name(name: str) -> bool:
    """Whether a name that was read from a file may be one of a sweep, and leads to no other folder."""
    return re.fullmatch(r"[\w.\-]+", name, re.ASCII) is not None and ".." not in name


def former_name(study: str, id: str) -> str:
    """The name under which earlier versions exported it."""
    return f"{key(label(study) or 'sweep')}-{id[:8]}"


def text(value: Any) -> str:
    """A value of a configuration in one line: text as it is, everything else as JSON. A long one is cut."""
    line = printable(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
    if len(line) <= LONGEST_TEXT:
        return line
    return f"{line[: LONGEST_TEXT - 9]}~{hashlib.sha256(line.encode()).hexdigest()[:8]}"


def cell(value: Any) -> Any:
    """A value of a table; of text, none that a spreadsheet would take for a formula."""
    if not isinstance(value, str):
        return value
    line = printable(value)
    return f"'{line}" if line.startswith(_FORMULA) else line
