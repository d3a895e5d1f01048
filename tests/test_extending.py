"""docs/extending.md is true: its files are written into a copy of the source, and its commands are run there.

Beside the copy the package of examples/plugin is installed, as pip installs it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import analysis
from tests.documented import commands, words_of
from tests.installed import run
from tests.sweeps.command import refused

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"^`([\w./]+)`:\n\n```(?:python|yaml|toml)\n(.*?)```", TEXT, flags=re.MULTILINE | re.DOTALL))
SHOWN = {name: FILES.pop(name) for name in list(FILES) if name.startswith("examples/")}
COMMANDS = commands(TEXT)
SHORT = (
    "model.width=16 model.depth=1 model.head_dim=8 model.context=16 train.batch=2 data.source=zipf data.vocabulary=32 "
    "data.length=2000 hydra.launcher.workers=1"
)
CALL_ALL = """
import contextlib, io, json, sys, traceback
from sweeps.commands.console import run

ended = []
for words in json.load(sys.stdin):
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = run(words)
        except SystemExit as stop:
            status = stop.code or 0
        except Exception:
            status = traceback.format_exc()
    ended.append((status, out.getvalue(), err.getvalue()))
json.dump(ended, sys.stdout)
"""

CHECK_AGC = """
import torch
from harness.model.parameters import Layout
from harness.model.scaling import tensor_table
from harness.model.state import State
from stability_harness_agc.agc import AGC
from sweeps.compose.arguments import config_loader
from sweeps.compose.grid import Composer

composer, ratios = Composer(config_loader(), "grid"), (0.01, 0.5, 1e30)
trials = [composer.trial(["model.width=16", "model.head_dim=8", f"agc.ratio={ratio}"]) for ratio in ratios]
layout, state = Layout(tuple(tensor_table(trials[0].model, 64))), State(4)
draw = torch.Generator().manual_seed(0)
weights, gradients = (torch.randn(3, layout.size, generator=draw, dtype=torch.float64) for _ in range(2))
layout.view(weights, "embedding")[0].zero_()
state.add("weights", weights)
clipper, clipped = AGC(layout, state, 3, weights.device), gradients.clone()
clipper.bind(trials)
acted = clipper.clip(clipped, clipped.norm(dim=1), torch.tensor([True, True, True]))
assert acted.tolist() == [True, True, False], acted
for scaled in layout.tensors:
    for r, ratio in enumerate(ratios):
        w, g, found = (layout.view(x, scaled.name)[r] for x in (weights, gradients, clipped))
        factor = min(1.0, ratio * max(float(w.norm()), 1e-3) / (float(g.norm()) + 1e-6))
        torch.testing.assert_close(found, g * factor, rtol=1e-6, atol=0)
stands = gradients.clone()
clipper.clip(stands, stands.norm(dim=1), torch.tensor([False, True, True]))
assert torch.equal(stands[0], gradients[0]) and torch.equal(stands[1], clipped[1])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's source with the page's files in it, and no other file touched."""
    folder = tmp_path_factory.mktemp("copy")
    for package in ("harness", "injectors", "sweeps", "analysis", "hydra_plugins"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        assert not (folder / name).exists(), f"{name} is to be a new file"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package of examples/plugin is installed, from a copy, in which building leaves its traces."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples/plugin", folder / "source")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    run(sys.executable, "-m", "pip", "install", *options, folder / "source", cwd=folder)
    return folder / "site"


@pytest.fixture(scope="module")
def ended(copy: Path, site: Path) -> dict[str, tuple[int | str, str, str]]:
    """The status and both outputs of each command, all of them called in one process of the copy's Python."""
    typed = [words_of(command, copy) for command in COMMANDS]
    lines = [[*words, *(SHORT.split() if words[0] == "sweep" else [])] for words in typed]
    done = subprocess.run(
        [sys.executable, "-c", CALL_ALL],
        input=json.dumps(lines),
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(COMMANDS, map(tuple, json.loads(done.stdout)), strict=True))


def test_the_page_has_examples() -> None:
    assert len(FILES) >= 5 and len(COMMANDS) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(copy: Path, ended: dict[str, tuple[int | str, str, str]], command: str) -> None:
    status, printed, errors = ended[command]
    assert status == 0, f"{status}\n{errors}"
    if command.startswith("stability-harness list"):
        text = "calm" if "--config-dir" in command else "agc"
        paper = {"calm": "Brown et al. 2020, arXiv 2005.14165", "agc": "Brock et al. 2021, arXiv 2102.06171"}[text]
        assert any(line.startswith(f"{text} ") and line.endswith(f"({paper}).") for line in printed.splitlines())
        return
    if not command.startswith("stability-harness sweep"):
        assert "loss_against_time." in printed, printed
        return
    out = copy / next(word for word in command.split() if word.startswith("out=")).removeprefix("out=")
    sweep = analysis.open_sweep(out)
    assert len(sweep.trial) >= 2 and set(sweep.outcome.values) == {"trained"}
    last = sweep.loss.isel(step=-1).values
    assert len(set(last.tolist())) == len(last), "each of them changes the run"


def test_it_shows_the_example_as_it_is() -> None:
    assert len(SHOWN) == 2 and "\npip install ./examples/plugin\n" in TEXT
    assert {name: (ROOT / name).read_text() for name in SHOWN} == SHOWN


def test_its_clipper_is_that_of_the_paper(copy: Path, site: Path) -> None:
    """By whole tensors: to `ratio` times the norm of the weights, of which no norm is taken for less than 1e-3."""
    run(sys.executable, "-c", CHECK_AGC, cwd=copy, PYTHONPATH=str(site))


def test_its_parts_keep_the_promises_of_every_setting(copy: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    run(*command, ROOT / "examples/plugin/test_plugin.py", cwd=copy, PYTHONPATH=f"{site}{os.pathsep}{copy}")


def test_the_package_alone_brings_its_options(tmp_path: Path) -> None:
    """Without it they are refused, as here."""
    (line,) = refused(tmp_path, "mitigation=agc", "plan=true")
    assert line.startswith("error: mitigation=agc: unknown mitigation; did you mean adagc? allowed: ")


def test_its_files_pass_the_linter(copy: Path) -> None:
    ruff, files = Path(sys.executable).with_name("ruff"), [copy / name for name in FILES if name.endswith(".py")]
    for check in (["check"], ["format", "--check"]):
        command = [ruff, *check, "--config", ROOT / "pyproject.toml", *files]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
