"""Which tests are slow: `python -m tests.slow JUNIT_XML` writes the list anew, from a run of the whole suite.

    .venv/bin/python -m pytest --numprocesses 4 --dist loadscope --no-loadscope-reorder --junitxml slow.xml
    .venv/bin/python -m tests.slow slow.xml

A test function is slow where its cases take more than `MEAN` seconds each, or `TOTAL` in all, beside three other
processes on two cores. `pytest -m "not slow"` leaves those out. A new test is not slow until the list is written again.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
MEAN, TOTAL = 0.7, 60.0  # seconds


def slow_functions() -> dict[str, frozenset[str]]:
    """The functions of each file, which stands by its path below `tests`."""
    lines = (line.partition(": ") for line in LIST.read_text().splitlines())
    return {file: frozenset(names.split()) for file, _, names in lines}


def measured(junit: Path) -> dict[str, list[str]]:
    """The slow functions of each file, from what pytest has written with `--junitxml`."""
    seconds = defaultdict[tuple[str, str], list[float]](list)
    for case in ElementTree.parse(junit).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
        seconds[file, case.attrib["name"].partition("[")[0]].append(float(case.attrib["time"]))
    found: dict[str, list[str]] = {}
    for (file, function), times in sorted(seconds.items()):
        if sum(times) > min(MEAN * len(times), TOTAL):
            found.setdefault(file, []).append(function)
    return found


if __name__ == "__main__":
    LIST.write_text("".join(f"{file}: {' '.join(names)}\n" for file, names in measured(Path(sys.argv[1])).items()))
