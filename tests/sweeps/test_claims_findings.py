"""The table of what was found of claims, and the page that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import ConfigError
from sweeps.claims import trained
from sweeps.claims.findings import FIRST, LAST, write_findings
from sweeps.claims.registered import claims
from sweeps.claims.verdicts import REFUTED
from tests.sweeps.test_claims_by_trials import MINE, ONE, call, own

PAGE = Path(__file__).parents[2] / "docs" / "findings" / "claims.md"


def test_findings_are_put_into_a_table(tmp_path: Path, capsys) -> None:
    """Rows of other claims stay, and go once the claim is another one; what is refuted stands first."""
    folder, out, page = own(tmp_path), tmp_path / "out", tmp_path / "findings.md"
    page.write_text(f"# Mine\n\n{FIRST}\n{LAST}\n\nThe end.\n")
    words = ("--config-dir", str(folder))
    assert call(capsys, "run", "mine", f"out={out}", *words, ONE)[0] == 0
    assert call(capsys, "verdict", str(out), "--page", str(page), *words)[0] == 0
    text = page.read_text()
    assert text.startswith("# Mine\n\n<!-- verdicts -->\n\n1 confirmed.\n") and text.endswith(
        "<!-- end -->\n\nThe end.\n"
    )
    row = next(line for line in text.splitlines() if line.startswith("| `mine`: "))
    (verdict,) = trained.verdicts(out, [claims(folder)["mine"]])
    (cell,) = verdict.cells
    assert f"width=16: {cell.judged.mean:.3g} [{cell.judged.low:.3g}, {cell.judged.high:.3g}]" in row
    assert f"registration {claims(folder)['mine'].registration[:8]} |" in row and "| **confirmed** |" in row
    assert "<svg" in page.with_suffix(".svg").read_text()
    # Another claim, which is refuted.
    other = own(tmp_path / "b", claim="It is worse", claimed="above", threshold=5.0)
    (folder / "claim" / "worse.yaml").write_text((other / "claim" / "mine.yaml").read_text())
    assert call(capsys, "run", "worse", f"out={tmp_path / 'more'}", *words, ONE)[0] == 0
    assert call(capsys, "verdict", str(tmp_path / "more"), "--page", str(page), *words)[0] == 0
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == ["worse", "mine"] and lines[1] == row
    assert f"**{REFUTED}**" in lines[0] and "1 refuted, 1 confirmed." in page.read_text()
    # Nothing new: the same page. A changed claim is not trained any more.
    before = page.read_text()
    write_findings(page, [], claims(folder))
    assert page.read_text() == before
    own(tmp_path, threshold=4.0)
    write_findings(page, [], claims(folder))
    assert "| `mine`" not in page.read_text()
    assert "`mine`" in page.read_text().partition("Not trained yet: ")[2]


def test_a_page_without_the_table_is_refused(tmp_path: Path) -> None:
    for text in ("", f"{LAST}\n{FIRST}"):
        (tmp_path / "page.md").write_text(text)
        with pytest.raises(ConfigError, match="page.md: has no table; allowed: a page with a line <!-- verdicts -->"):
            write_findings(tmp_path / "page.md", [], claims())
    with pytest.raises(ConfigError, match="nowhere.md: No such file"):
        write_findings(tmp_path / "nowhere.md", [], claims())


def test_the_page_of_the_documentation_is_that_of_our_claims(tmp_path: Path) -> None:
    """No row of a claim that has changed since, and every other one named."""
    copy = tmp_path / "claims.md"
    copy.write_text(PAGE.read_text())
    write_findings(copy, [], claims())
    assert copy.read_text() == PAGE.read_text()
    assert MINE["claim"] not in PAGE.read_text()
