"""Whether Triton's programs are used, or torch's own operations, which stay the reference."""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from harness.basics.devices import on_cpu


def are_used(device: torch.device) -> bool:
    """Whether passes over arrays on this device are Triton programs.

    They are on a CUDA device if Triton is installed and can build what launches its programs, and on `meta`, which
    stands for one, if it is installed. A CPU has them only where code takes an accelerator's ways on it
    (`harness.basics.devices`) and Triton interprets its programs (TRITON_INTERPRET=1): in tests.
    """
    if on_cpu(device) or not is_installed():
        return False
    if device.type == "cpu":
        return are_interpreted()
    return device.type == "meta" or (device.type == "cuda" and can_build())


def version(device: torch.device) -> str | None:
    """Triton's, where its programs are used; None where torch's operations are."""
    if not are_used(device):
        return None
    import triton

    return str(triton.__version__)


@cache
def is_installed() -> bool:
    """Whether Triton is there to be imported."""
    return find_spec("triton") is not None


def are_interpreted() -> bool:
    """Whether programs run in Triton's interpreter, on a CPU, as they are written."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def can_build() -> bool:
    """Whether there is what Triton needs to launch a program: a C compiler, and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for them
    return compiler is not None and (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").is_file()
