"""What holds for every test."""

from __future__ import annotations

import os
import signal
from typing import Any

# Tests run side by side: threads that spin while they wait take the cores from one another. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

# What is started in the background hears no Ctrl-C, and neither would the commands that tests stop with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread: packs this small do not repay two. A test may set more."""
    torch.set_num_threads(1)


FOLDERS = ["slurm", "sweeps", "injectors"]  # of those that take longest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first."""
    order = {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


class ByFile(LoadScopeScheduling):
    """Side by side (`make test`), a file is for one process, and all tests of Slurm, which mostly wait, are for one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "slurm" if file.startswith("tests/slurm/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)
