"""Which files of results folders a test reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.storage.results_folder import ResultsPath


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of results folders that are read from here on, and those that are not there."""
    read: list[Path] = []
    descriptor = ResultsPath.descriptor

    def noted(file: ResultsPath, *arguments: Any) -> int:
        read.append(file.path)
        return descriptor(file, *arguments)

    monkeypatch.setattr(ResultsPath, "descriptor", noted)
    return read
