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
