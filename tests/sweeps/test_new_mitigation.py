"""A new mitigation is one file: its tests find it, and its row of the documentation is made by a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEW = """# @package _global_
about:
  text: A {name} clip of the global norm
  paper: Pascanu et al. 2013, arXiv 1211.5063
  section: Parametrisation, decay, clipping
  note: Half of `clip_1`
  neutral:
    optim.clip: {strength}
optim:
  clip: 0.5
"""
IN_MITIGATIONS = (
    "test_it_trains[{}]",
    "test_its_bits_do_not_depend_on_the_pack[{}]",
    "test_killed_it_goes_on_bit_for_bit[{}]",
    "test_what_strikes_some_trials_leaves_the_others_alone[{}]",
    "test_an_element_that_is_not_finite[{}-nan]",
    "test_an_element_that_is_not_finite[{}-inf]",
    "test_an_element_that_is_not_finite[{}--inf]",
    "test_a_gradient_a_million_times_too_large[{}]",
    "test_without_strength_it_is_the_recipe[{}]",
)
CASES = (
    *(f"tests/sweeps/test_mitigations.py::{name}" for name in IN_MITIGATIONS),
    "tests/sweeps/test_catalogue.py::test_one_description_and_a_source[mitigation={}]",
    "tests/sweeps/test_combinations.py::test_with_another_it_is_the_union_or_refused[{}]",
)
UP_TO_DATE = "tests/test_mitigations_doc.py::test_its_tables_are_up_to_date"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project's source with two files more, the second of which says what is not true."""
    for folder in ("harness", "injectors", "sweeps", "analysis", "hydra_plugins", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, strength in (("good", "1.0e+30"), ("false", "0.01")):
        new = tmp_path / f"sweeps/conf/mitigation/new_{name}.yaml"
        new.write_text(NEW.format(name=name, strength=strength))
    return tmp_path


def python(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout


def test_its_tests_find_it(copy: Path) -> None:
    """All of them pass, and that of the strength does not where what the file says is not true."""
    files = sorted({case.partition("::")[0] for case in (*CASES, UP_TO_DATE)})
    chosen = "new_good or (new_false and strength) or test_its_tables_are_up_to_date"
    printed = python(copy, "pytest", *files, "-k", chosen, "-p", "no:cacheprovider", "-v", "--no-header")
    lines = (line.split() for line in printed.splitlines() if line.startswith("tests/") and "::" in line)
    expected = {case.format("new_good"): "PASSED" for case in CASES}
    without_strength = f"tests/sweeps/test_mitigations.py::{IN_MITIGATIONS[-1]}"
    expected |= {without_strength.format("new_false"): "FAILED", UP_TO_DATE: "FAILED"}
    assert {words[0]: words[1] for words in lines} == expected


def test_a_command_makes_its_row(copy: Path) -> None:
    python(copy, "sweeps.commands.tables", "docs/mitigations.md", "docs/faults.md")
    before, after = ((folder / "docs/mitigations.md").read_text().splitlines() for folder in (ROOT, copy))
    rows = [line for line in after if line not in before]
    words = "A {} clip of the global norm (Pascanu et al. 2013, arXiv 1211.5063). Half of `clip_1`."
    assert rows == [f"| `new_{name}` | {words.format(name)} | `optim.clip: 0.5` |" for name in ("false", "good")]
    assert [line for line in after if line not in rows] == before
    assert (copy / "docs/faults.md").read_text() == (ROOT / "docs/faults.md").read_text()
