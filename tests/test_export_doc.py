"""docs/export.md: its commands run, and its tables have every target and option that there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.export.registry import targets
from tests.analysis import synthetic
from tests.documented import commands, words_of

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "export.md").read_text()
LINES = commands(TEXT, "export")


def test_every_target_is_there_with_its_extra() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (?:nothing|`'stability-harness\[(\w+)\]'`) \|", TEXT, flags=re.MULTILINE)
    assert {name: extra or None for name, extra in rows} == {name: target.extra for name, target in targets().items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = {target.extra for target in targets().values() if target.extra}
    assert extras < project["project"]["optional-dependencies"].keys()
    for extra in extras:
        for library in project["project"]["optional-dependencies"][extra]:
            is_ours = library in project["project"]["dependencies"] or library.startswith(("sqlalchemy", "alembic"))
            assert is_ours or library in project["dependency-groups"]["dev"], library


@pytest.mark.parametrize("line", LINES)
def test_its_commands_select_trials(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As typed, but as CSV: what each library does with it is tested elsewhere."""
    words = words_of(line, tmp_path)[1:]
    trials = [
        synthetic.make_trial(width=width, mitigation=name)
        for width in (32, 64)
        for name in ("none", "sandwich", "qk_norm")
    ]
    synthetic.write_pack(tmp_path / words[0], trials)
    monkeypatch.chdir(tmp_path)
    assert words[words.index("--to") + 1] in targets()
    words[words.index("--to") + 1] = "csv"
    assert main(["export", *words]) == 0
    assert capsys.readouterr().out.startswith("2 trials," if "--where" in line else "6 trials,")


def test_every_option_is_told() -> None:
    assert {"--where", "--signals", "--incidents", "--into", "--to"} <= {*re.findall(r"--[a-z]+", TEXT)}
    assert len(LINES) == 4
