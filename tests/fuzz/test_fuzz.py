"""A few examples of each kind, always the same; `make fuzz` tries others for an hour."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.command_lines import furnish
from tests.fuzz.commands import Ended, Failure, check, check_same, seen
from tests.fuzz.kinds import KINDS

EXAMPLES = {"command_lines": 25, "yaml_files": 20, "stores": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_it_is_given_a_command_ends_as_it_should(kind: str) -> None:
    """Within seconds, with status 0, 1 or 2, a line for each thing that is wrong, and nothing of others touched."""

    @settings(
        max_examples=EXAMPLES[kind],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(KINDS[kind].examples)
    def examine(example: object) -> None:
        KINDS[kind].check(example)

    examine()


GOOD = Ended(("status", "out"), 2, "", "error: out=x: holds no results; allowed: y\n", False, 0.1)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"is_hung": True}, "it hung"),
        ({"status": 3}, "it ended with status 3"),
        ({"status": -9}, "it ended with status -9"),
        ({"status": 0}, "an error, but status 0"),
        ({"err": ""}, "status 2 without a word"),
        ({"err": "error: \n"}, "an error that says nothing"),
        ({"err": 2 * GOOD.err}, "2 lines of error"),
        ({"err": f"{GOOD.err}and more\n"}, "a line that is neither an error nor a warning"),
        ({"err": GOOD.err.replace("x", "\x1b[2J")}, "control characters"),
        ({"out": "Traceback (most recent call last):\n"}, "a traceback"),
    ],
)
def test_what_no_command_may_do_is_found(changed: dict[str, object], what: str) -> None:
    assert check(GOOD, most_errors=1) == GOOD
    with pytest.raises(Failure, match=what):
        check(dataclasses.replace(GOOD, **changed), most_errors=1)


def test_what_is_touched_is_found(tmp_path: Path) -> None:
    furnish(tmp_path)
    before = seen(tmp_path, tmp_path / "out")
    (tmp_path / "out").mkdir()
    check_same(before, seen(tmp_path, tmp_path / "out"), [])
    (tmp_path / "victims" / "thesis.tex").write_text("mine")
    with pytest.raises(Failure, match="it touched victims/thesis.tex"):
        check_same(before, seen(tmp_path, tmp_path / "out"), [])
