"""docs/gpu.md: its commands are those that there are, and its table that of the checks."""

from __future__ import annotations

import re
from pathlib import Path

from harness.training.pack_sizes import rows_at_once
from sweeps.commands.console import commands as known_commands
from tests.documented import commands, words_of
from tests.gpu.__main__ import STUDY, parsed
from tests.gpu.marks import CHECKS, GROUPS
from tests.gpu.results import BEGIN, END, NOTHING

ROOT = Path(__file__).resolve().parents[1]
TEXT, BENCHMARKS = ((ROOT / "docs" / name).read_text() for name in ("gpu.md", "benchmarks.md"))
MAKEFILE = (ROOT / "Makefile").read_text()
LINES = [
    line.split("#")[0].split() for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]


def test_its_commands_are_there(tmp_path: Path) -> None:
    assert {line.split()[1] for line in commands(TEXT)} == {"sweep", "figure"} <= {*known_commands()}
    assert all(f"study={STUDY}" in words_of(line, tmp_path) for line in commands(TEXT, "sweep"))
    assert (ROOT / "sweeps" / "conf" / "study" / f"{STUDY}.yaml").exists()
    ours = [words[3:] for words in LINES if words[:3] == ["python", "-m", "tests.gpu"]]
    assert {parsed(words).task for words in ours} == {*GROUPS, "merge"}
    targets = {words[1] for words in LINES if words[0] == "make"} | set(re.findall(r"`make ([\w-]+)`", TEXT))
    assert targets == {"gpu", "gpu-wheels", "gpu-figure"} and all(f"\n{target}:" in MAKEFILE for target in targets)


def test_its_table_is_that_of_the_checks() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (.+) \|$", TEXT, re.MULTILINE)
    assert [int(number) for number, _ in rows] == [check.number for check in CHECKS]
    for (_, wanted), check in zip(rows, CHECKS, strict=True):
        marks = {float(end) for mark in check.marks.values() for end in (mark.least, mark.most) if end}
        said = {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", wanted)}
        assert said == marks or check.number == 15, check.title
    for group in GROUPS:
        line = next(
            line for line in TEXT.splitlines() if line.startswith(f"python -m tests.gpu {group} ") and "--" not in line
        )
        told, _, others = line.split("#")[1].split(":")[0].replace("checks", "").partition(" to ")
        first, *rest = map(int, re.findall(r"\d+", told))
        last = [int(number) for number in re.findall(r"\d+", others)]
        numbers = [first, *rest] if not last else [*range(first, last[0] + 1), *last[1:]]
        assert numbers == [check.number for check in CHECKS if check.group == group]


def test_the_line_that_nothing_is_measured_goes_with_the_first_figures() -> None:
    inside = BENCHMARKS.split(BEGIN)[1].split(END)[0]
    assert (NOTHING in TEXT) == (NOTHING in inside), "take it from docs/gpu.md too"
    assert NOTHING in inside or "| passed |" in inside or "missed" in inside


def test_packs_are_as_large_as_it_says() -> None:
    from torch import device

    from harness.config import Model

    assert rows_at_once(Model(), 8, device("cuda")) == 64 and "up to 64 trials at once" in TEXT
