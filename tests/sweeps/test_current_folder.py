"""What lies in the folder in which a command is typed is never run, whatever its name."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest

from harness.storage.store import open_store
from harness.storage.stored import complete_trials
from sweeps import current_folder
from sweeps.compose.settings import SlurmOptions
from sweeps.planning.planner import make_plan
from sweeps.slurm.executor import SlurmExecutor
from tests.installed import run, run_all
from tests.jobs import job_of
from tests.sweeps import command

BIN = Path(sys.executable).parent
OURS = {"harness", "injectors", "analysis", "sweeps", "hydra_plugins"}
NAMES = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), *OURS}
NAMES |= {"sitecustomize", "usercustomize"}
TRAP = """
with open({marker!r}, "a") as file:
    file.write(__name__ + "\\n")
raise ImportError("trapped: " + __name__)
"""


def lay_traps(folder: Path, *but: str) -> Path:
    """A file of the name of every module that could be imported, `but` some. Each says when it is; returns where."""
    marker = folder.parent / f"{folder.name}.marker"
    for name in NAMES - set(but):
        (folder / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    return marker


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished sweep in a folder full of traps, trained there by two workers of the console command."""
    folder = tmp_path_factory.mktemp("stranger")
    marker = lay_traps(folder)
    line = command.tiny(
        "hydra.launcher.workers=2", "seed=range(8)", "fault=none,weight_bit", "fault.start=2", "out=out"
    )
    assert "trained 16 of 16 trials" in run(BIN / "stability-harness", "sweep", *line, cwd=folder)
    assert not marker.exists(), marker.read_text()
    return folder / "out"


def test_the_console_command(results: Path) -> None:
    marker = lay_traps(results)
    lines = ["status .", "cancel .", "report .", "figure faulty_against_golden . ../figure.svg", "list"]
    lines += ["coordinate-check --help", "sweep --help", "completion bash --line sweep", "--version"]
    run_all(BIN / "stability-harness", *lines, cwd=results)
    assert not marker.exists(), marker.read_text()


def test_python_m(results: Path, tmp_path: Path) -> None:
    """Only a package of that very name is run by Python itself. Other ranks are processes with paths of their own."""
    marker = lay_traps(tmp_path, "sweeps", "analysis")
    run(sys.executable, "-m", "analysis", "figure", "faulty_against_golden", results, "figure.png", cwd=tmp_path)
    assert not marker.exists(), marker.read_text()
    line = command.tiny("train.ranks=2", "ranks=processes", "out=ranks")
    assert "trained 1 of 1 trial" in run(sys.executable, "-m", "sweeps", *line, cwd=tmp_path)
    assert not marker.exists(), marker.read_text()


SRUN = '#!/bin/bash\nwhile [[ $1 != */python* ]]; do shift; done\nexec "$@"\n'  # without its own options
OPTIONS = {name: value for name, value in vars(SlurmOptions()).items() if name != "_target_"}


def test_a_slurm_job(tmp_path: Path) -> None:
    """Its script, run as Slurm runs it but for srun, in the folder in which it was submitted."""
    cwd, tools, out = (tmp_path / name for name in ("cwd", "tools", "out"))
    cwd.mkdir()
    tools.mkdir()
    marker = lay_traps(cwd)
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    (pack,) = make_plan(command.tiny_trials("seed=1,2"), (), None, "cpu", 1).packs
    folder = open_store(out, "grid")
    script = SlurmExecutor(OPTIONS, wait=True)._script(folder, "token", [[job_of(pack, out, block=2)]], 1)
    words = script.read_text()
    assert words.index("export PYTHONSAFEPATH=1") < words.index("srun")
    numbers = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "1", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    numbers |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"}
    numbers |= {"SLURM_JOB_NODELIST": "here", "PATH": f"{tools}:{os.environ['PATH']}"}
    run("bash", script, cwd=cwd, **numbers)
    assert not marker.exists(), marker.read_text()
    assert len(complete_trials(out)) == 2


# --- where the project stands ------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which Python has put on the path twice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/some/library"])
    monkeypatch.setenv("PYTHONPATH", f":{tmp_path}:/some/library")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    return tmp_path


def test_a_strange_folder_is_left(here: Path) -> None:
    current_folder.leave()
    assert sys.path == ["/some/library"]
    assert (os.environ["PYTHONPATH"], os.environ["PYTHONSAFEPATH"]) == ("/some/library", "1")


def test_the_projects_own_folder_stays_for_this_process_and_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_folder, "PROJECT", str(here))
    current_folder.leave()
    assert sys.path[0] == str(here)
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(here), "/some/library"]


def test_a_clone_that_is_not_installed_runs_where_it_stands(tmp_path: Path) -> None:
    """Its own mitigation is planned: no other copy of the project was imported."""
    for package in OURS:
        source = Path(current_folder.PROJECT) / package
        shutil.copytree(source, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    mitigation = tmp_path / "sweeps" / "conf" / "mitigation" / "mine.yaml"
    mitigation.write_text("# @package _global_\noptim: {beta2: 0.5}\n")
    assert "2 to train" in run(sys.executable, "-m", "sweeps", "plan=true", "mitigation=none,mine", cwd=tmp_path)


@pytest.mark.parametrize(
    ("words", "arguments", "is_ours"),
    [
        (["python", "-m", "sweeps", "plan=true"], ["-m", "plan=true"], True),
        (["python", "-u", "-msweeps"], ["-m"], True),
        (["python", "-m", "sweeps.commands.coordinate_check", "x.png"], ["-m", "x.png"], True),
        (["python", "-m", "mine", "sweeps"], ["-m", "sweeps"], False),
        (["python", "mine.py"], ["mine.py"], False),
        (["python", "-m", "sweeps"], ["/site-packages/sweeps/commands/sweep.py"], False),
    ],
)
def test_only_a_command_of_ours_touches_the_path(
    monkeypatch: pytest.MonkeyPatch, words: list[str], arguments: list[str], is_ours: bool
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", arguments)
    assert current_folder.is_run_by_name("sweeps") == is_ours
