"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.browsing import chromium  # noqa: F401  a fixture for every folder
from tests.slow import slow_functions

TESTS = Path(__file__).parent

# What tests share is asserted in as in a test: with the values of both sides.
for shared in (
    "sweeps.command",
    "analysis.synthetic",
    "analysis.judging",
    "analysis.mitigated",
    "analysis.exporting",
    "analysis.tracked",
):
    pytest.register_assert_rewrite(f"tests.{shared}")
pytest.register_assert_rewrite("harness.testing")

# Tests run side by side: threads that spin while they wait take the cores from one another. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

KERNELS_AS_IS = "TESTS_WITH_KERNELS_AS_IS"  # tests/harness/test_cpu_kernels.py runs others with it

# What is started in the background hears no Ctrl-C, and neither would the commands that tests stop with it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Products are those that commands take, which tests compare with this process; or, where that is asked for, those
    of a CPU that MKL does not take for Intel's."""
    from harness.basics.cpu_kernels import cpu_kernels, write_answer

    if os.environ.get(KERNELS_AS_IS):
        write_answer(False)
    else:
        cpu_kernels()  # before anything is multiplied; loads torch where the CPU is not Intel's and has AVX-512


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What twelve thousand tests are made of stays until the end: no collection of garbage goes through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread: packs this small do not repay two. A test may set more."""
    import torch  # not by the process that hands out the tests

    torch.set_num_threads(1)


LONG = ("test_kernels.py", "harness/test_conformance.py", "user_loop/test_commands.py", "user_loop/test_replay.py")
LONG += ("test_gpu_dry.py", "test_readme.py", "sweeps/test_postmortem.py", "user_loop/test_examples.py")
LONG += ("test_site.py", "test_wheel.py", "user_loop/test_healthy.py", "sweeps/test_extend.py", "sweeps/test_watch.py")
"""The longest files: the last to begin would be waited for by all other processes."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests. Those of Slurm and the longest files come first, and files of sweeps, which often wait for
    processes, among those that compute."""
    slow = slow_functions()
    for item in items:
        function = item.name.partition("[")[0]
        if function in slow.get(item.path.relative_to(TESTS).as_posix(), ()):
            item.add_marker(pytest.mark.slow)
    folders: dict[str, list[Path]] = {"slurm": [], "sweeps": [], "others": []}
    for file in dict.fromkeys(item.path for item in items):
        folders.get(file.parent.name, folders["others"]).append(file)
    first = dict.fromkeys(folders.pop("slurm"), -2.0)
    place = first | {file: i / len(files) for files in folders.values() for i, file in enumerate(files)}
    place |= {file: -1.0 for file in place if file.as_posix().endswith(LONG)}
    items.sort(key=lambda item: place[item.path])


class ByFile(LoadScopeScheduling):
    """Side by side (`make test`), a file is for one process, and all tests of Slurm, which mostly wait, are for one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "slurm" if file.startswith("tests/slurm/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)
