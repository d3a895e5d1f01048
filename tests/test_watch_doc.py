"""docs/watch.md: its commands are those that there are, and its numbers those of the code."""

from __future__ import annotations

from pathlib import Path

from analysis.pages.follower import MOST_CURVES, SHARE
from analysis.pages.static_page import MOST_BYTES, MOST_PAGES
from sweeps.commands.console import commands as known_commands
from tests.documented import commands

TEXT = (Path(__file__).parent.parent / "docs" / "watch.md").read_text()


def test_its_commands_are_there() -> None:
    assert {line.split()[1] for line in commands(TEXT)} == {"report", "watch", "trial"} <= {*known_commands()}


def test_its_numbers_are_those_of_the_code() -> None:
    assert f"at most {MOST_PAGES} have curves, and at most {MOST_BYTES // 10**6} MB" in TEXT
    assert MOST_CURVES == 20 and "the twenty trials that moved last" in TEXT
    assert SHARE == 1 / 5 and "costs at most a fifth of one core's time" in TEXT
