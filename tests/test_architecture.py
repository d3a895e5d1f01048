"""Imports go one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"harness", "injectors", "sweeps", "analysis", "hydra_plugins"}
ALLOWED = {
    "harness": set(),
    "injectors": {"harness"},
    "analysis": {"harness"},
    "sweeps": {"harness", "injectors", "analysis"},  # a campaign that stops by itself looks at what it has found
    "hydra_plugins": {"harness", "sweeps"},
}
NARROW = {
    # analysis reads datasets: of the harness it knows the store's layout, the configuration's fields, what a results
    # folder is, how files and a command line are read, how text is printed, and what last weights are.
    "analysis": {
        "harness.store",
        "harness.config",
        "harness.command_line",
        "harness.gpt2",
        "harness.last_weights",
        "harness.printing",
        "harness.records",
        "harness.results_folder",
    },
    # injectors know sites, shapes, configuration, what optimizers keep and the arithmetic that they imitate, never the
    # loop or the pack.
    "injectors": {
        "harness.sites",
        "harness.config",
        "harness.scaling",
        "harness.taps",
        "harness.formats",
        "harness.optimizers",
        "harness.ranks",
        "harness.schedules",
        "harness.store",
    },
}


def imported(file: Path) -> set[str]:
    """Modules that a file imports, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module in PACKAGES}
    return found


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_go_one_way(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        for module in imported(file):
            top = module.split(".")[0]
            if top in PACKAGES - {package}:
                assert top in ALLOWED[package], f"{file.relative_to(ROOT)} imports {module}"
                if package in NARROW and "." in module:
                    assert any(module.startswith(name) for name in NARROW[package]), f"{file.name} imports {module}"


def test_only_one_file_is_a_hydra_application() -> None:
    users = [
        file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if "@hydra.main" in file.read_text()
    ]
    assert [file.relative_to(ROOT).as_posix() for file in users] == ["sweeps/__main__.py"]
