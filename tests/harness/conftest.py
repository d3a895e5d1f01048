"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenized text of other tests is not found."""
    monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path / "own_cache"))
