"""docs/postmortem.md: its commands are those that there are, and its study can be planned."""

from __future__ import annotations

import re
from pathlib import Path

from analysis.measures.causes import CAUSES, RULES
from sweeps.commands.console import commands as known_commands
from tests.documented import commands
from tests.sweeps import command

INCIDENTS = ("incidents", "postmortem", "causes", "cross")
TEXT = (Path(__file__).parent.parent / "docs" / "postmortem.md").read_text()


def test_its_commands_are_there() -> None:
    assert {line.split()[1] for line in commands(TEXT)} == {"sweep", "report", *INCIDENTS} <= {*known_commands()}


def test_its_study_is_every_family_of_faults_once(tmp_path: Path) -> None:
    line = commands(TEXT, "sweep")[0]
    ended = command.call(*line.split("#")[0].split()[2:], f"out={tmp_path / 'out'}", "plan=true")
    assert ended.status == 0 and ended.out.startswith("29 trials asked for, 1 golden twin added"), ended.err


def test_its_rules_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (?:(\d+) )?\| ([a-z ]+) \|", TEXT, flags=re.MULTILINE)
    asked = [cause for _, cause in rows]
    merged = [cause for number, (cause, _) in enumerate(RULES) if not number or RULES[number - 1][0] != cause]
    assert asked == [*merged, "unknown"] and set(asked) == set(CAUSES)
