"""Which matrix products a CPU runs: on a CPU that is not Intel's torch takes slower ones than it could.

The MKL inside torch asks once whether the CPU is Intel's, and keeps the answer in a variable. On other CPUs it leaves
AVX-512 aside, which on AMD's Zen 5 was seen to cost half of the speed. Here the answer is written before MKL asks, in
this process alone. MKL has no setting for it: MKL_ENABLE_INSTRUCTIONS, MKL_DEBUG_CPU_TYPE and MKL_CBWR change nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.basics.cache_folder import cache_folder
from harness.basics.errors import ConfigError

KERNELS = "kernels"  # in the environment of what was trained
AUTO, AS_IS, AVX512 = "auto", "as_is", "avx512"
CHOICES = (AUTO, AS_IS, AVX512)
NAMES = ("mkl_serv_intel_cpu_true", "mkl_serv_intel_cpu")  # MKL's functions that give the answer
STARTS = (b"\x8b\x05", b"\x85\xc0\x78\x01\xc3", b"\x83\xf8\xff\x74\x01\xc3")
"""x86-64: load the variable, and return it unless it is negative; or unless it is -1."""
UNASKED = -1
NEEDED = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}  # MKL's kernels for AVX-512 use all of them
LEAST_GAIN = 1.2  # products have to be so many times as fast, for `auto`
SECONDS = 120  # for the check in another process, which takes three
CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Kernels:
    """What the products of this process run on, and why: `as_is` or `avx512`."""

    name: str
    why: str


@dataclass(frozen=True)
class Cpu:
    """Who made the CPU, as `cpuid` says it, its model, and the instructions that it has."""

    maker: str
    model: str
    flags: frozenset[str]

    @property
    def has_avx512(self) -> bool:
        """Whether it can run what MKL has for AVX-512."""
        return self.flags >= NEEDED


class _Unchanged(Exception):
    """Why products stay as they are."""


_current: Kernels | None = None


def current_kernels() -> str:
    """What the products of this process run on."""
    return chosen_kernels() or AS_IS


def chosen_kernels() -> str | None:
    """What this process has chosen; None before it has."""
    return None if _current is None else _current.name


def kernels_changed(environment: Mapping[str, Any], step: int) -> str | None:
    """What is said of training that goes on at `step` with other kernels than those of its `environment`."""
    before, now = str(environment.get(KERNELS, AS_IS)), current_kernels()
    if before == now:
        return None
    return f"trained with cpu.kernels {before} before step {step}, and {now} from there on: its bits may differ"


def cpu_kernels(asked: str = AUTO) -> Kernels:
    """Choose the kernels of this process's matrix products on a CPU; to be called before the first one.

    Args:
        asked: `auto` takes AVX-512 on a CPU that is not Intel's where a check in another process finds its products
            right, and at least 1.2 times as fast; the check runs once a machine. `avx512` insists on it. `as_is`
            leaves torch alone.

    Returns:
        What was chosen, and why. A second call with `auto` returns the choice of the first.

    Raises:
        ConfigError: another word; `avx512` that cannot be had; or another choice than that of the first call.
    """
    global _current
    if asked not in CHOICES:
        raise ConfigError(f"cpu.kernels={asked}: unknown; allowed: {', '.join(CHOICES)}")
    if _current is None:
        _current = _chosen(asked)
    elif asked != AUTO and asked != _current.name and not (asked == AVX512 and _has_them_anyway()):
        reason = f"this process has chosen {_current.name} before, and kernels are chosen once a process"
        raise ConfigError(f"cpu.kernels={asked}: {reason}; allowed: auto, {_current.name}, or a new process")
    return _current


def _chosen(asked: str) -> Kernels:
    if asked == AS_IS:
        return Kernels(AS_IS, "cpu.kernels=as_is")
    try:
        if _has_them_anyway():
            raise _Unchanged("an Intel CPU, for which torch takes its best kernels anyway")
        if not this_cpu().has_avx512:
            raise _Unchanged(f"the CPU ({this_cpu().model}) lacks AVX-512")
        variables = _variables()
        if asked == AUTO:
            gain = _gain()
        for variable in variables:
            variable.value = 1
    except _Unchanged as reason:
        if asked == AVX512 and not _has_them_anyway():
            raise ConfigError(f"cpu.kernels=avx512: {reason}; allowed: auto, as_is") from None
        return Kernels(AS_IS, str(reason))
    return Kernels(AVX512, f"{gain:.2f} times as fast as without" if asked == AUTO else "cpu.kernels=avx512")


def _has_them_anyway() -> bool:
    return this_cpu().maker == "GenuineIntel"


@cache
def this_cpu() -> Cpu:
    """The CPU of this machine; of an unknown maker, without instructions, where Linux does not describe it."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    model = found.get("model name") or platform.processor() or platform.machine()
    return Cpu(found.get("vendor_id", ""), model, frozenset(found.get("flags", "").split()))


def write_answer(is_intel: bool) -> None:
    """Have MKL take this for the maker of the CPU. Raises RuntimeError where it cannot be told so, or not any more."""
    try:
        for variable in _variables():
            variable.value = int(is_intel)
    except _Unchanged as reason:
        raise RuntimeError(str(reason)) from None


def _variables() -> list[Any]:
    """Where MKL keeps the answer. Raises _Unchanged where that is not known, or MKL has asked already."""
    import torch  # this folder is loaded where torch is not needed

    if sys.platform != "linux" or platform.machine() != "x86_64" or not torch.backends.mkl.is_available():
        raise _Unchanged("torch multiplies without MKL here")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        places = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in NAMES]
    except (OSError, AttributeError):
        raise _Unchanged("this build of torch has its MKL elsewhere") from None
    variables = [_variable(place) for place in places]
    if any(variable.value != UNASKED for variable in variables):
        raise _Unchanged("this process has multiplied matrices before")
    return variables


def _variable(function: int) -> Any:
    """The variable that a function of MKL's returns. Raises _Unchanged if its code is not what is expected."""
    code = ctypes.string_at(function, 12)
    if not code.startswith(STARTS[0]) or not code[6:].startswith(STARTS[1:]):
        raise _Unchanged("this build of torch has an MKL that is not known here")
    offset = int.from_bytes(code[2:6], "little", signed=True)
    return ctypes.c_int.from_address(function + 6 + offset)


# --- the check in another process --------------------------------------------------------------------------------


def _gain() -> float:
    """How many times as fast products are; looked up, or measured. Raises _Unchanged if they are not worth it."""
    record = _record()
    said = _read(record)
    if said is None:
        with _one_at_a_time(record):
            said = _read(record)
            if said is None:
                try:
                    said = _checked()
                except OSError as error:  # no memory for a process, say: another time it may do
                    raise _Unchanged(f"the check of its products could not be started: {error}") from None
                _write(record, said)
    if "error" in said:
        raise _Unchanged(f"the check of its products failed: {said['error']} (kept in {record})")
    if said["gain"] < LEAST_GAIN:
        found = f"products are {said['gain']:.2f} times as fast with the other kernels, and not {LEAST_GAIN}"
        raise _Unchanged(f"{found} (kept in {record})")
    return float(said["gain"])


def _record() -> Path:
    """Where it is kept what a check has found: for each model of CPU and version of torch."""
    import torch

    about = json.dumps([this_cpu().model, sorted(this_cpu().flags), torch.__version__, LEAST_GAIN])
    return cache_folder() / "cpu_kernels" / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"


def _read(record: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(record.read_text())
        return said if "error" in said or said["gain"] > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


@contextlib.contextmanager
def _one_at_a_time(record: Path) -> Iterator[None]:
    """Others wait meanwhile, and then read what was found; where there can be no lock, each checks for itself."""
    from filelock import FileLock, Timeout  # `attach` needs no more than torch and a few

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, Timeout, NotImplementedError):
            record.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{record}.lock", timeout=3 * SECONDS))
        yield


def _write(record: Path, said: dict[str, Any]) -> None:
    """Whole or not at all, since others may read it; a folder that cannot be written costs a check each time."""
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
            json.dump(said, file)
        os.replace(file.name, record)


def _checked() -> dict[str, Any]:
    """The gain that two processes measure, one after the other, or the error of the one with other kernels."""
    try:
        before, after = _measured(None), _measured(1)
    except (ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    if not after["is_right"]:
        return {"error": "its products differ from those in float64"}
    return {"gain": before["seconds"] / after["seconds"]}


def _measured(answer: int | None) -> dict[str, Any]:
    """What harness/basics/kernel_check.py finds in a process of its own, with MKL's answer written or as it is."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-m", "harness.basics.kernel_check", "" if answer is None else str(answer)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS, env=environment, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
