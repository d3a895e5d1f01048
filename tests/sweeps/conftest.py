"""What the tests of this folder share."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sweeps.command import REPOSITORY, _started, is_group_gone
from tests.sweeps.traps import RIGGED


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """A sweep in this process sets the number of threads and Hydra's variable for itself alone.

    What a failing test has started and not ended, ends with it.
    """
    threads, before = torch.get_num_threads(), os.environ.get("HYDRA_FULL_ERROR")
    yield
    while _started:
        group = _started.pop().pid
        if not is_group_gone(group):
            os.killpg(group, signal.SIGKILL)
    torch.set_num_threads(threads)
    if before is None:
        os.environ.pop("HYDRA_FULL_ERROR", None)


@pytest.fixture(scope="session")
def rigged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `injectors` have one fault more."""
    folder = tmp_path_factory.mktemp("rigged")
    shutil.copytree(REPOSITORY / "injectors", folder / "injectors", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "injectors" / "rigged.py").write_text(RIGGED)
    return folder


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
