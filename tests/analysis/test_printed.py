"""Tables in a terminal: folded where that is narrower, as they are otherwise."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.reports.printed import LEAST, table_lines

WORDS = "jump of the update, weight-norm consistency check, exploding gradients"
TABLE = pd.DataFrame(
    {
        "trial": ["0f5c8c89ccc8d4e2", "5ae4f3209d578025"],
        "seen": [WORDS, "non-finite"],
        "steps": [1, 20],
        "loss": [2.5, None],
    }
)


def lines(monkeypatch: pytest.MonkeyPatch, width: int, is_terminal: bool = True) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    return table_lines(TABLE)


def test_a_pipe_has_a_line_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(monkeypatch, 60, is_terminal=False)
    assert len(found) == 3 and WORDS in found[1] and found[2].endswith("-")


def test_whole_numbers_are_in_full() -> None:
    """A width of 1024 is no 1.02e+03, also beside fractions."""
    table = pd.DataFrame({"width": [1024.0, 1536.5], "rate": [0.0123456, 2e7]})
    assert [line.split() for line in table_lines(table)] == [
        ["width", "rate"],
        ["1024", "0.0123"],
        ["1.54e+03", "2e+07"],
    ]


def test_a_wide_terminal_has_it_as_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 200) == lines(monkeypatch, 60, is_terminal=False)


@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_narrow_one_folds_words_and_cuts_no_id_or_number(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    found = lines(monkeypatch, width)
    assert max(map(len, found)) <= width and len(found) > 3
    words = " ".join(found).split()
    assert {"0f5c8c89ccc8d4e2", "5ae4f3209d578025", "2.5", "20", "-"} <= set(words)
    assert set(WORDS.split()) <= set(words), "folded between words"


def test_where_folding_is_not_enough_lines_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, 16 + LEAST) == lines(monkeypatch, 60, is_terminal=False)
