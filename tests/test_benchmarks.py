"""Benchmarks take too long for tests; here each is only loaded, so that a name that moved is noticed, and told of."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(file.stem for file in (ROOT / "tests" / "benchmarks").glob("*.py") if file.stem != "__init__")
PARTS = {"peers"}  # of others, and no command


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_loads_and_says_how_it_is_run(name: str) -> None:
    module = importlib.import_module(f"tests.benchmarks.{name}")
    assert callable(getattr(module, "main", None)) == (name not in PARTS)
    assert name in PARTS or f"python -m tests.benchmarks.{name}" in (module.__doc__ or "")


def test_the_page_names_each_of_them() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = [line.split("`")[1].split()[2] for line in page.splitlines() if line.startswith("| `python -m tests.")]
    assert sorted(table) == [f"tests.benchmarks.{name}" for name in MODULES if name not in PARTS]
