"""docs/mitigations.md shows every mitigation with the fields that it sets, and its commands are sweeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.config import ConfigError, sections
from sweeps.commands.tables import with_tables
from sweeps.compose.arguments import check_arguments, config_loader, expand
from sweeps.compose.grid import Composer
from tests.documented import commands, words_of

TEXT = (Path(__file__).parent.parent / "docs" / "mitigations.md").read_text()
LINES = commands(TEXT, "sweep")
WORDS = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))


def test_its_tables_are_up_to_date() -> None:
    assert with_tables(TEXT) == TEXT, "make tables"


def test_a_table_that_is_not_up_to_date_is_made_anew() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| `qk_clip` |"))
    assert with_tables(TEXT.replace(f"{row}\n", "")) == with_tables(TEXT.replace(row, f"{row}\n{row}")) == TEXT


def test_a_section_that_no_page_has() -> None:
    with pytest.raises(ConfigError) as raised:
        with_tables(TEXT.replace("<!-- mitigation: Precision -->", "<!-- mitigation: Precisions -->"))
    assert raised.value.reasons[0].startswith(
        "mitigation=accumulation_fp32: about.section=Precision: no such part of the page; allowed: Parametrisation, "
    )


def test_every_mitigation_is_shown() -> None:
    assert set(config_loader().get_group_options("mitigation")) - {"none"} <= set(WORDS)


def test_every_field_it_names_exists() -> None:
    known = {f"{part}.{name}" for part, cls in sections().items() for name in vars(cls())}
    fields = {word.partition(":")[0].partition("=")[0] for word in WORDS if re.match(r"[a-z_0-9]+\.[a-z_0-9]+", word)}
    named = {field for field in fields if field.partition(".")[0] in sections()}
    assert len(named) > 30
    assert named <= known


@pytest.mark.parametrize("line", LINES)
def test_its_trials_can_be_made(line: str, tmp_path: Path) -> None:
    loader, (_, *words) = config_loader(), words_of(line, tmp_path)
    overrides = [word for word in words if word != "-m"]
    check_arguments(overrides, loader)
    study = next((word.partition("=")[2] for word in overrides if word.startswith("study=")), "grid")
    jobs = expand({}, [word for word in overrides if not word.startswith(("study=", "out="))], loader)
    assert Composer(loader, study).trials(jobs)
