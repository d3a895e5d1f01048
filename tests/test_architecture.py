"""Imports go one way, as docs/architecture.md says: from folder to folder, and from file to file without a circle."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {  # each may import from those above it in its own package, and from the packages of OTHERS
    "harness": [
        "basics",
        "config",
        "storage",
        "kernels",
        "model",
        "data",
        "optim",
        "rewards",
        "policy",
        "readings",
        "detectors",
        "recovery",
        "guards",
        "objectives",
        "training",
        "faults",
        "nonfinite",
        "incidents",
        "loop",
        "memory",
        "user_loop",
        "testing",
    ],
    "analysis": [
        "reading",
        "again",
        "measures",
        "arithmetic",
        "forecasts",
        "forecast_scores",
        "figures",
        "pages",
        "reports",
        "export",
        "commands",
    ],
    "sweeps": ["compose", "planning", "running", "slurm", "claims", "search", "commands"],
    "injectors": [],
    "hydra_plugins": [],
}
OTHERS = {
    "harness": set(),
    "injectors": {"harness"},
    "analysis": {"harness", "injectors"},  # the latter where batches are made again, and nowhere else
    "sweeps": {"harness", "injectors", "analysis"},  # a campaign that stops by itself looks at what it has found
    "hydra_plugins": {"harness", "sweeps"},
}
NARROW = {
    # analysis reads what is stored: it knows neither how a model computes nor how it is trained.
    "analysis": {
        "harness.basics",
        "harness.config",
        "harness.detectors",
        "harness.readings",
        "harness.storage",
        "harness.objectives.outcome",
        "harness.model.gpt2",
        "harness.model.outline",
    },
    # ... but for the folder that makes batches and runs again.
    "analysis.again": {"harness", "injectors"},
    # injectors know sites, shapes, configuration, what optimizers keep and the arithmetic that they imitate, never the
    # loop or the pack.
    "injectors": {
        "harness.basics",
        "harness.config",
        "harness.faults",
        "harness.model.formats",
        "harness.model.branches",
        "harness.model.outline",
        "harness.model.scaling",
        "harness.optim",
        "harness.storage",
        "harness.training.ranks",
        "harness.training.sites",
    },
}
ALONE = {"harness/basics/plugins.py"}  # imports by name: parts find themselves
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
LONGEST_PAGE, LONGEST_LINE_OF_A_PAGE = 130, 100
GENERATED = {"commands.md", "keys.md", "dataset.md", "figures.md", "errors.md"}  # when the site is built
PROSE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.name not in GENERATED and page.parent.name != "tutorials" and "_build" not in page.parts
]
PAGES = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
SHARED_NAME = "Options"  # the settings of a part, which its module is asked for: harness/basics/plugins.py


@cache
def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name; a package is its `__init__`."""
    found = {}
    for package in FOLDERS:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imported(module: str) -> set[str]:
    """The project's modules that one imports anywhere: at its top, in a function, or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules().keys() or {node.module}
    return (found & modules().keys()) - {module}


def test_there_is_no_circle() -> None:
    try:
        list(TopologicalSorter({module: imported(module) for module in modules()}).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_go_one_way(package: str) -> None:
    order = FOLDERS[package]
    for module in (name for name in modules() if name.split(".")[0] == package):
        own = module.split(".")[1:2]
        for other in imported(module):
            top, *rest = other.split(".")
            if top != package:
                assert top in OTHERS[package], f"{module} imports {other}"
                allowed = NARROW.get(".".join(module.split(".")[:2]), NARROW.get(package))
                assert allowed is None or any(f"{other}.".startswith(f"{name}.") for name in allowed), (
                    f"{module} imports {other}"
                )
            elif own and own[0] in order and rest and rest[0] in order:
                assert order.index(rest[0]) <= order.index(own[0]), f"{module} imports {other}"


def test_every_folder_says_what_lives_there() -> None:
    for package, order in FOLDERS.items():
        folders = {file.parent.name for file in (ROOT / package).glob("*/__init__.py")}
        assert folders == set(order), package
        for folder in order:
            assert ast.get_docstring(ast.parse((ROOT / package / folder / "__init__.py").read_text()))


def test_only_plugins_import_by_name() -> None:
    """Beside `analysis`, whose public names tests/analysis/test_public_names.py holds together."""
    by_name = {file.relative_to(ROOT).as_posix() for file in modules().values() if "import_module(" in file.read_text()}
    assert by_name == ALONE | {"analysis/__init__.py"}


def test_files_and_functions_are_short() -> None:
    for file in modules().values():
        text = file.read_text()
        assert text.count("\n") <= LONGEST_FILE, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
                assert node.end_lineno - start < LONGEST_FUNCTION, f"{file}: {node.name}"


def test_each_class_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for module, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name != SHARED_NAME:
                found.setdefault(node.name, []).append(module)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_only_one_file_is_a_hydra_application() -> None:
    users = [file for file in modules().values() if "@hydra.main" in file.read_text()]
    assert [file.relative_to(ROOT).as_posix() for file in users] == ["sweeps/commands/sweep.py"]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_pages_name_files_that_exist_in_short_lines(page: Path) -> None:
    text = page.read_text()
    assert [line for line in text.splitlines() if len(line) > LONGEST_LINE_OF_A_PAGE] == []
    tops = "harness|injectors|analysis|sweeps|hydra_plugins|examples|tests|docs"
    named = re.findall(rf"`((?:{tops})/[^`\s]*)`", text)
    for place in [braced for name in named for braced in _without_braces(name)]:
        assert list(ROOT.glob(place.rstrip("/"))) or list(ROOT.glob(f"tests/{place}")), f"{page.name}: {place}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_of_every_page_is_in_short_lines(page: Path) -> None:
    """But for tables, pictures, and code, of which a line may be a whole command."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "![", "`"))]
    assert [line for line in lines if len(line) > LONGEST_LINE_OF_A_PAGE] == []


def _without_braces(name: str) -> list[str]:
    """`a/{b,c}.py` is two files."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [name]


def test_the_page_has_every_room() -> None:
    text = PAGES[0].read_text()
    rooms = [f"{package}/{folder}/" for package, folders in FOLDERS.items() for folder in folders]
    assert [room for room in rooms if f"\n{room} " not in text] == []
    assert text.count("\n") < LONGEST_PAGE
