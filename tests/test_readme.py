"""The README's commands work as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.__main__ import main
from tests.sweeps.conftest import call

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
SWEEPS = [line for line in COMMANDS if re.match(r"python -m sweeps (?!status|cancel)", line)]
QUICK = ["train.steps=8", "schedule.warmup=2", "fault.start=4", "train.validate_every=4", "model.depth=1"]
QUICK += ["model.context=16", "train.batch=2", "train.validate_batches=1"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenized text is made once for all tests of this file; what sweeps in this process set, ends with them."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HYDRA_FULL_ERROR", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the folders that the README speaks of."""
    (tmp_path / "books").mkdir()
    for i in range(4):
        words = np.random.default_rng(i).choice(["to", "be", "or", "not", "question", "whether"], 4000)
        (tmp_path / "books" / f"{i}.txt").write_text(" ".join(words))
    (tmp_path / "shards").mkdir()
    np.random.default_rng(0).integers(0, 50257, 20_000).astype("<u2").tofile(tmp_path / "shards" / "all.bin")
    return tmp_path


def words_of(line: str, home: Path) -> list[str]:
    """The words of a command line of the README, whose folders are in `home`."""
    words = [os.path.expanduser(word) for word in shlex.split(line, comments=True)]
    return [word.replace("=~/", f"={home}/").replace("=/shared/", f"={home}/") for word in words]


def sweep(line: str, home: Path, *more: str) -> str:
    """Run a sweep of the README in `home`, in this process; its standard output."""
    python, option, package, *words = words_of(line, home)
    assert (python, option, package) == ("python", "-m", "sweeps")
    with contextlib.chdir(home):
        ended = call(*words, *more)
    assert ended.status == 0, f"{line}\n{ended.out}{ended.err}"
    return ended.out


def analyse(line: str, home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an analysis of the README in `home`, in this process; its standard output."""
    python, option, package, *words = words_of(line, home)
    assert (python, option, package) == ("python", "-m", "analysis")
    with contextlib.chdir(home):
        status = main(words)
    printed = capsys.readouterr()
    assert status == 0, f"{line}\n{printed.out}{printed.err}"
    return printed.out


def run(line: str, home: Path, *more: str) -> str:
    """Run a command line of the README in `home`, with this Python; its standard output."""
    words = [sys.executable if word == "python" else word for word in words_of(line, home)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*words, *more], capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("line", SWEEPS)
def test_every_sweep_of_the_readme_can_be_planned(line: str, home: Path) -> None:
    if "slurm" in line and shutil.which("sbatch") is None:
        pytest.skip("needs Slurm (make slurm)") if not os.environ.get("CI") else pytest.fail("no sbatch")
    more = [] if "plan=true" in line else ["plan=true"]
    assert "to train in" in sweep(line, home, *more)


def test_the_grid_of_the_readme_runs_and_is_reported(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = next(line for line in SWEEPS if "out=results/first" in line and "plan=true" not in line)
    assert "trained 48 of 48 trials" in run(grid, home, *QUICK)
    report = next(line for line in COMMANDS if line.startswith("python -m analysis report"))
    assert "Report: results/first/report.html" in analyse(report, home, capsys)


def test_the_six_lines_of_python_open_a_quickstart(home: Path) -> None:
    sweep("python -m sweeps study=quickstart", home, *QUICK, "model.width=32,64", "optim.lr=1e-3,1e-2")
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) == 6
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=environment)
    assert done.returncode == 0, done.stderr
    assert "trial" in done.stdout


def test_the_mitigation_of_the_readme_is_a_mitigation(home: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "yaml"]
    (home / "conf" / "mitigation").mkdir(parents=True)
    (home / "conf" / "mitigation" / "mine.yaml").write_text(text)
    planned = sweep(f"python -m sweeps --config-dir {home}/conf mitigation=none,mine", home, "plan=true")
    assert "2 trials asked for" in planned


def test_what_the_readme_names_exists() -> None:
    for path in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:harness|injectors|sweeps|analysis|docs|tests)/[\w./]+)`", README):
        assert "NAME" in path or (ROOT / path).exists(), path
