"""What holds for every test."""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread: packs this small do not repay two. A test may set more."""
    torch.set_num_threads(1)
