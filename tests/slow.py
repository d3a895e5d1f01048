"""Which tests are slow: `python -m tests.slow JUNIT_XML...` writes the list anew, from runs of the suite.

    .venv/bin/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder --junitxml whole.xml
    .venv/bin/python -m tests.slow whole.xml
    .venv/bin/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder --junitxml rest.xml -m "not slow"
    .venv/bin/python -m tests.slow whole.xml rest.xml

A test function is slow where its cases take more than `MEAN` seconds each, or `TOTAL` in all, beside three other
processes on two cores. The second run finds those that then wait for what slow ones had made for the whole file.
`pytest -m "not slow"` leaves both out. A new test is not slow until the list is written again.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
MEAN, TOTAL = 0.5, 40.0  # seconds


def slow_functions() -> dict[str, frozenset[str]]:
    """The functions of each file, which stands by its path below `tests`."""
    lines = (line.partition(": ") for line in LIST.read_text().splitlines())
    return {file: frozenset(names.split()) for file, _, names in lines}


def measured(*junits: Path) -> dict[str, list[str]]:
    """The functions of each file that were slow in some run, from what pytest has written with `--junitxml`."""
    found: dict[str, set[str]] = {}
    for junit in junits:
        seconds = defaultdict[tuple[str, str], list[float]](list)
        for case in ElementTree.parse(junit).iter("testcase"):
            file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
            seconds[file, case.attrib["name"].partition("[")[0]].append(float(case.attrib["time"]))
        for (file, function), times in seconds.items():
            if sum(times) > min(MEAN * len(times), TOTAL):
                found.setdefault(file, set()).add(function)
    return {file: sorted(found[file]) for file in sorted(found)}


if __name__ == "__main__":
    slow = measured(*map(Path, sys.argv[1:]))
    LIST.write_text("".join(f"{file}: {' '.join(names)}\n" for file, names in slow.items()))
