"""What holds for every test."""

from __future__ import annotations

import os

# Tests run side by side: threads that spin while they wait take the cores from one another. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread: packs this small do not repay two. A test may set more."""
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (`make test`), a file is for one process, and all tests of Slurm, which mostly wait, are for one.

    What takes longest comes first.
    """
    folders = ["slurm", "sweeps", "injectors"]
    items.sort(key=lambda item: folders.index(item.path.parent.name) if item.path.parent.name in folders else 9)
    for item in items:
        group = "slurm" if item.get_closest_marker("slurm") else f"{item.path.parent.name}/{item.path.name}"
        item.add_marker(pytest.mark.xdist_group(group))
