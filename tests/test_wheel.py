"""The wheel has everything: installed without the source beside it, its commands run in a folder elsewhere."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.installed import run, run_all
from tests.sweeps.command import tiny

ROOT = Path(__file__).parent.parent
PACKAGES = ("harness", "injectors", "sweeps", "analysis", "hydra_plugins")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the source, in which building leaves its traces."""
    folder = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_it_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    ours = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    expected = {path.relative_to(ROOT).as_posix() for path in ours if path.suffix != ".pyc"}
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected


def test_it_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """In a venv of its own; what it depends on is taken from this one's, where this source is not."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python, program = venv / "bin" / "python", venv / "bin" / "stability-harness"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=tmp_path)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run(program, "--version", cwd=elsewhere).startswith("stability-harness 0.")
    line = " ".join(tiny("seed=range(8)", "fault=none,weight_bit", "fault.start=2", "hydra.launcher.workers=2"))
    commands = ["sweep plan=true", f"sweep {line} out=out", "status out", "report out", "list"]
    printed = run_all(program, *commands, cwd=elsewhere, python=python)
    assert "1 trial asked for" in printed and "trained 16 of 16 trials" in printed
    assert "16 of 16 trials done" in printed and "Report: out/report.html" in printed and "qk_norm" in printed
    loop = (ROOT / "examples" / "attach" / "convolutions.py").read_text()
    (elsewhere / "own.py").write_text(loop)
    assert run(python, "own.py", "flips", "6", cwd=elsewhere).startswith("18 faults in ")
    assert "Page: flips/campaign.html" in run(program, "campaign", "flips", cwd=elsewhere)
    where = run(python, "-c", "import harness, sweeps; print(harness.__file__, sweeps.__file__)", cwd=elsewhere)
    assert all(path.startswith(str(site)) for path in where.split())
