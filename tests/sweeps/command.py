"""Runs `python -m sweeps` as a user does, or in this process where a start of two seconds would be too long."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import xarray as xr
from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import OmegaConf

from analysis.reading.open_sweep import open_sweep
from harness.config import Trial
from sweeps.commands.sweep import main
from sweeps.compose.arguments import config_loader, expand
from sweeps.compose.grid import Composer
from sweeps.compose.hydra_calls import FOLDER, own_folder
from sweeps.compose.overrides import trial_fields
from sweeps.compose.places import PLAIN, is_general, nodes, stems
from sweeps.running import local, progress
from sweeps.running.job import corpus_of
from tests.sweeps.forks import Forked

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE = 120.0  # seconds, for what takes about one, or ten where a browser looks on and the machine is busy
TINY = {
    "model.width": "16",
    "model.depth": "1",
    "model.head_dim": "8",
    "model.context": "16",
    "train.batch": "2",
    "train.steps": "6",
    "train.validate_tokens": "16",
    "train.validate_between": "16",
    "schedule.warmup": "2",
    "data.source": "zipf",
    "data.vocabulary": "32",
    "data.length": "2000",
    "pack.size": "4",
    "telemetry.block": "2",
    "hydra.launcher.workers": "1",
}
"""A hundredth of a second a pack."""


@cache
def general_mitigations() -> tuple[str, ...]:
    """Those that are for any objective, without `none`."""
    names = stems(FOLDER / "mitigation")
    return tuple(name for name in names if name != "none" and is_general("mitigation", name, None))


def write_yaml(folder: Path, name: str, content: str) -> None:
    """A YAML below `folder`; those of faults are no difference to the whole configuration."""
    package = "" if name.startswith("fault/") else "# @package _global_\n"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{package}{content}\n")


def tiny(*arguments: str) -> list[str]:
    """A command line for tiny models: flags first, then TINY less what the arguments set or their launcher lacks."""
    flags = [text for text in arguments if text.startswith("-")]
    rest = [text for text in arguments if not text.startswith("-")]
    taken = {text.partition("=")[0].lstrip("+~") for text in rest}
    if any(text.startswith("hydra/launcher=") for text in rest):
        taken.add("hydra.launcher.workers")
    return [*flags, *(f"{key}={value}" for key, value in TINY.items() if key not in taken), *rest]


_started: list[subprocess.Popen | Forked] = []


# --- running it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int | None
    out: str
    err: str


def call(*arguments: str, shows_progress: bool = False) -> Ended:
    """The command in this process, which remembers nothing of an earlier one but the recipes of our own studies.

    Lines of progress, which a busy machine may show, are left out if they are not asked for.
    """
    corpus_of.cache_clear()
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["sweeps", *arguments]
    status: Any = None
    try:
        # One thread: such small models gain nothing by two, which wait for each other on a busy machine.
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(local, "available_cores", lambda: 1),
            mock.patch.object(Composer, "recipe", _recipe),
            mock.patch.object(progress, "FIRST_SECONDS", 0.0 if shows_progress else math.inf),
        ):
            main()
    except SystemExit as stop:
        status = stop.code
    finally:
        sys.argv = argv
    return Ended(status, out.getvalue(), err.getvalue())


_recipe_of, _recipes = Composer.recipe, dict[tuple[str, ...], dict[str, Any]]()


def _recipe(composer: Composer, name: str = PLAIN) -> dict[str, Any]:
    """`Composer.recipe`, made once for each of our own studies: a quarter of a small command's time goes into it."""
    if name != PLAIN or own_folder(composer.loader) is not None:
        return _recipe_of(composer, name)
    if (key := (composer.study, *trial_fields())) not in _recipes:  # installed packages may add fields
        _recipes[key] = _recipe_of(composer, name)
    return dict(_recipes[key])


def refused(folder: Path, *arguments: str) -> list[str]:
    """The lines with which the command refuses, checked for all that must not happen."""
    before = tree(folder)
    ended = call(*arguments)
    assert (ended.status, ended.out) == (2, "")
    assert tree(folder) == before
    assert ended.err.endswith("\n")
    return ended.err.splitlines()


def start(
    *arguments: str, cwd: Path, path: Sequence[Path] = (), stdout: int = subprocess.PIPE, **variables: str
) -> subprocess.Popen:
    """The command in a process group of its own, as a shell starts it; `path` comes before this repository.

    `variables` are set in its environment.
    """
    found = os.pathsep.join(map(str, (*path, REPOSITORY)))
    environment = os.environ | {"PYTHONPATH": found, "PYTHONFAULTHANDLER": "1", **variables}
    pipes: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "sweeps", *arguments]
    _started.append(subprocess.Popen(command, cwd=cwd, start_new_session=True, env=environment, **pipes))
    return _started[-1]


def end(process: subprocess.Popen | Forked) -> Ended:
    """Wait for it; nothing of its group is left behind, whatever happens. What hangs says where."""
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)  # the place of each of its threads comes to standard error
        out, err = process.communicate(timeout=DEADLINE)
        err = re.sub(r"\n*Extension modules:.*", "", err)
        raise AssertionError(f"has not ended within {DEADLINE} s; it said {out!r} and\n{err}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(process.returncode, out, err)


def fork(*arguments: str, cwd: Path, path: Sequence[Path] = (), **variables: str) -> Forked:
    """As `start`, but forked from a process that has torch loaded."""
    _started.append(Forked(arguments, cwd, (*path, REPOSITORY), variables))
    return _started[-1]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` holds, and return its value; a deadline passed is a failure."""
    last = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < last, f"{what}: not within {DEADLINE} s"
        time.sleep(0.03)
    return value


HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
    "print('held', flush=True); input()"
)


@contextlib.contextmanager
def held(lock: object) -> Iterator[None]:
    """This file is locked by another process, which is killed at the end."""
    words = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            yield
        finally:
            other.kill()


def _group(group: int) -> Iterator[Path]:
    """The /proc folder of each process of this group; those that ended and wait for their parent are none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                yield folder


def is_group_gone(group: int) -> bool:
    return not any(_group(group))


def is_importing_torch(group: int) -> bool:
    """Whether the process that is going to fork the workers of this group has loaded torch's largest library."""
    for folder in _group(group):
        with contextlib.suppress(OSError):
            is_server = b"multiprocessing.forkserver" in (folder / "cmdline").read_bytes()
            if is_server and "libtorch_cpu" in (folder / "maps").read_text():
                return True
    return False


# --- what it left ------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder under `folder`: its digest and time of change, so that a rewrite shows too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = f"{hashlib.sha256(content).hexdigest()} {path.lstat().st_mtime_ns}"
    return found


def results(out: Path) -> xr.Dataset:
    """Everything that was measured, in the order of the trials' ids; without speed, which is never the same twice."""
    dataset = open_sweep(out).drop_vars(["tokens_per_second", "step_seconds"]).load()
    return dataset.sortby("trial")


def differing(left: xr.Dataset, right: xr.Dataset) -> list[str]:
    """Variables in which any bit differs between two sweeps of the same trials; `pack` may differ."""
    assert left.trial.values.tolist() == right.trial.values.tolist()
    names = [*left.data_vars, "outcome", "complete", "nonfinite_step", "golden"]
    return [str(name) for name in names if left[name].values.tobytes() != right[name].values.tobytes()]


# --- grids without running ---------------------------------------------------------------------------------------


def loader(folder: Path | None = None) -> ConfigLoader:
    """What composes configurations in the command; `folder` is its --config-dir."""
    return config_loader(folder)


def for_stock_hydra(folder: Path) -> Path:
    """Our files as stock Hydra can read them, made in `folder`: all defaults, and nothing `about` itself."""
    for path, node in nodes().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.structured(node), folder / f"{path}.yaml")
    for file in FOLDER.rglob("*.yaml"):
        copied = folder / file.relative_to(FOLDER)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(re.sub(r"^about:\n(  .*\n)*", "", file.read_text(), flags=re.MULTILINE))
    return folder


def trials(*overrides: str, study: str = "grid", folder: Path | None = None) -> list[Trial]:
    """The trials that these overrides describe, as the command makes them."""
    its_loader = loader(folder)
    config = its_loader.load_configuration("config", [f"study={study}"], run_mode=RunMode.MULTIRUN)
    sweeper = OmegaConf.to_container(config.hydra.sweeper)
    params = {str(key): value for key, value in sweeper["params"].items()}
    keys = frozenset(text.partition("=")[0] for text in overrides)
    jobs = expand(params, overrides, its_loader, sweeper["grids"], sweeper["conditions"])
    return Composer(its_loader, study, keys).trials(jobs)


def tiny_trials(*overrides: str) -> list[Trial]:
    """The trials of a command line for tiny models."""
    return trials(*(text for text in tiny(*overrides) if not text.startswith(("pack.", "telemetry.", "hydra."))))


@cache
def composer() -> Composer:
    """One for all trials of the study `grid` that need none of their own; it lets values reach no trial."""
    return Composer(loader(), "grid")


def grid(*overrides: str) -> list[Trial]:
    """The trials that these overrides of the study `grid` describe, by the one composer."""
    return composer().trials(expand({}, overrides, composer().loader))


def only(*overrides: str, **options: Any) -> Trial:
    (trial,) = trials(*overrides, **options)
    return trial
