"""docs/faults.md shows every fault, and its commands are sweeps."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sweeps.commands.tables import with_tables
from sweeps.compose.arguments import check_arguments, config_loader, expand
from sweeps.compose.grid import Composer
from tests.documented import commands, words_of

TEXT = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()
LINES = commands(TEXT, "sweep")


@pytest.mark.parametrize("line", [line for line in LINES if "fault=replay" not in line])
def test_its_trials_can_be_made(line: str, tmp_path: Path) -> None:
    """Replays need results; tests/injectors/test_replay.py runs them."""
    loader, (_, *overrides) = config_loader(), words_of(line, tmp_path)
    check_arguments(overrides, loader)
    study = next((word.partition("=")[2] for word in overrides if word.startswith("study=")), "grid")
    run = ("study=", "plan=", "campaign.", "out=")
    jobs = expand({}, [word for word in overrides if not word.startswith(run)], loader)
    trials = Composer(loader, study).trials(jobs)
    assert trials
    if study == "grid":
        assert all(trial.fault.name != "none" for trial in trials)


def test_its_tables_are_up_to_date() -> None:
    assert with_tables(TEXT) == TEXT, "make tables"


def test_every_fault_is_shown() -> None:
    shown = {word.partition("=")[2] for line in LINES for word in shlex.split(line) if word.startswith("fault=")}
    assert set(config_loader().get_group_options("fault")) - shown == {"none"}
