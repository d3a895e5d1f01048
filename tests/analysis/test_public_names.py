"""What `import analysis` hands on, each name when it is first used."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import analysis


def test_type_checkers_see_the_same_names() -> None:
    *_, block = (node for node in ast.parse(inspect.getsource(analysis)).body if isinstance(node, ast.If))
    imports = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {node.module: tuple(name.name for name in node.names) for node in imports}
    assert seen == {f"analysis.{home}": names for home, names in analysis._HOMES.items()}
    assert sorted(analysis.__all__) == sorted(name for names in seen.values() for name in names)
    assert "\n__all__ = [\n" in inspect.getsource(analysis)  # a computed list is none to them: "does not export"


def test_every_name_is_there_and_no_other() -> None:
    for name in analysis.__all__:
        assert getattr(analysis, name).__name__ == name and name in dir(analysis)
    with pytest.raises(AttributeError, match="module 'analysis' has no attribute 'open_sweeps'"):
        _ = analysis.open_sweeps


def test_a_sweep_is_opened_without_what_draws_and_composes() -> None:
    script = "import sys, analysis; analysis.open_sweep; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "analysis.reading.open_sweep" in loaded
    assert not {"matplotlib", "seaborn", "plotly", "hydra", "optuna", "sweeps"}.intersection(loaded)
