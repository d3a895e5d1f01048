"""Kernels of matrix products on a CPU that is not Intel's. Such a CPU is made here by MKL's own answer, 0 for no."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import cpu_kernels as public
from harness.basics import cpu_kernels as kernels
from harness.basics.cpu_kernels import AS_IS, AVX512, NEEDED, UNASKED, Cpu, Kernels, cpu_kernels, this_cpu
from harness.basics.environment import environment_of
from harness.config import ConfigError
from tests.conftest import KERNELS_AS_IS, TESTS

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this build of torch has no MKL")
needs_avx512 = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or not this_cpu().has_avx512, reason="this CPU has no AVX-512"
)
FAST = Cpu("AuthenticAMD", "a CPU", frozenset(NEEDED | {"avx2", "fma"}))
OLD = replace(FAST, flags=frozenset({"avx2", "fma"}))

PRODUCTS = """
import hashlib, sys, torch
from harness.basics import cpu_kernels as kernels
{before}
torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
a, b = torch.randn(8, 96, 200, generator=draw), torch.randn(8, 200, 72, generator=draw)
print(hashlib.sha256((a @ b).numpy().tobytes()).hexdigest())
"""
STRANGER = """
from dataclasses import replace
kernels.this_cpu = lambda cpu=kernels.this_cpu(): replace(cpu, maker="AuthenticAMD")
measured = kernels._measured
kernels._measured = lambda answer: measured(answer or 0)  # as it is on a CPU that is not Intel's
"""


def products(before: str, **variables: str) -> list[str]:
    """What a process prints that multiplies after doing this; last a digest of its products."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS.format(before=before)],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- on this machine's own MKL -----------------------------------------------------------------------------------


@needs_mkl
def test_mkl_takes_the_answer_that_is_written():
    """Other products than without, by the answer alone; the same as without, if it is the one that MKL has itself."""
    by_answer = {answer: products(f"kernels.write_answer({answer})")[-1] for answer in (True, False)}
    assert by_answer[True] != by_answer[False]
    if this_cpu().maker == "GenuineIntel":
        assert products("")[-1] == by_answer[True]


@needs_avx512
def test_a_stranger_takes_the_best_kernels_once_they_are_checked(tmp_path):
    """In every process from then on, and the check runs once."""
    folder = {"STABILITY_HARNESS_CACHE": str(tmp_path)}
    expected = products("kernels.write_answer(True)")[-1]
    choose = f"{STRANGER}\nprint(kernels.cpu_kernels())"
    first, digest = products(choose, **folder)
    assert first.startswith("Kernels(name='avx512', why='") and "times as fast" in first
    assert digest == expected
    (record,) = tmp_path.glob("cpu_kernels/*.json")
    assert json.loads(record.read_text())["gain"] > 1.2
    assert products(f"{STRANGER}\nkernels._measured = None\nprint(kernels.cpu_kernels())", **folder) == [first, digest]


@needs_avx512
def test_of_several_processes_one_checks(tmp_path):
    """As where a hundred jobs begin at once: the others wait, and read what it has found."""
    told = tmp_path / "told"
    slow = f"""
import os, time
{STRANGER}
def measured(answer):
    with open({str(told)!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(2)
    return {{"is_right": True, "seconds": 0.5 if answer else 1.0}}
kernels._measured = measured
print(kernels.cpu_kernels().name)
"""
    words = [sys.executable, "-c", PRODUCTS.replace("{before}", slow)]
    environment = os.environ | {"STABILITY_HARNESS_CACHE": str(tmp_path)}
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    said = [process.communicate(timeout=120)[0].splitlines()[0] for process in started]
    assert said == ["avx512"] * 3
    pids = told.read_text().split()
    assert len(pids) == 2 and len(set(pids)) == 1, "as it is, and with AVX-512"


@needs_mkl
def test_it_is_too_late_once_something_was_multiplied():
    able = "kernels.this_cpu = lambda cpu=kernels.this_cpu(): replace(cpu, flags=cpu.flags | kernels.NEEDED)"
    late = f"torch.ones(64, 64) @ torch.ones(64, 64)\n{STRANGER}\n{able}"
    chosen, _ = products(f"{late}\nprint(kernels.cpu_kernels().why)")
    assert chosen == "this process has multiplied matrices before"


def test_promises_hold_with_the_kernels_of_a_stranger():
    """As they do with this CPU's own, wherever else these tests are run. Those that start others are left out."""
    if torch.backends.mkl.is_available() and products("kernels.write_answer(False)") == products(""):
        pytest.skip("a stranger's kernels are this CPU's own, with which those files are run anyway")
    files = ("harness/test_promises.py", "harness/test_twins.py", "sweeps/test_resume.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / file) for file in files)]
    words += ["-k", "not (disk or permission or commands_at_once or killed_again)"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {KERNELS_AS_IS: "1"}, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def measured(gain: float, is_right: bool) -> dict[str, Any]:
    """What a check finds."""
    return {"seconds": 1 / gain, "is_right": is_right}


# --- on others ---------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Have this process stand on a CPU, with what a check would find, and MKL's variables at the values given."""

    def stand(cpu: Cpu = FAST, gain: float = 2.0, is_right: bool = True, answer: int = UNASKED) -> list[Any]:
        variables = [ctypes.c_int(answer), ctypes.c_int(answer)]
        monkeypatch.setattr(kernels, "_current", None)
        monkeypatch.setattr(kernels, "this_cpu", lambda: cpu)
        given = itertools.cycle(variables)
        monkeypatch.setattr(kernels, "_variable", lambda place: next(given))
        monkeypatch.setattr(kernels, "_measured", lambda answer: measured(gain if answer else 1.0, is_right))
        monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path))
        return variables

    return stand


@needs_mkl
def test_what_is_chosen_stands_where_it_was_trained(machine):
    variables = machine()
    assert cpu_kernels().name == AVX512 and [one.value for one in variables] == [1, 1]
    assert environment_of(torch.device("cpu"), 1)["kernels"] == AVX512
    assert cpu_kernels() is cpu_kernels(), "it is chosen once"
    with pytest.raises(ConfigError, match="^cpu.kernels=as_is: this process has chosen avx512 before, .*allowed: "):
        cpu_kernels("as_is")


SOFT = {
    "Intel's": ({"cpu": replace(FAST, maker="GenuineIntel")}, "an Intel CPU"),
    "an old CPU": ({"cpu": OLD}, "the CPU (a CPU) lacks AVX-512"),
    "parts of it": ({"cpu": replace(FAST, flags=frozenset({"avx512f", "avx2"}))}, "the CPU (a CPU) lacks AVX-512"),
    "nothing is known": ({"cpu": Cpu("", "a machine", frozenset())}, "the CPU (a machine) lacks AVX-512"),
    "no gain": ({"gain": 1.02}, "products are 1.02 times as fast with the other kernels, and not 1.2"),
    "wrong products": ({"is_right": False}, "its products differ from those in float64"),
    "too late": ({"answer": 0}, "has multiplied matrices before"),
}


@needs_mkl
@pytest.mark.parametrize("case", SOFT)
def test_it_trains_as_before_and_says_why(machine, case):
    given, why = SOFT[case]
    variables = machine(**given)
    before = [one.value for one in variables]
    chosen = cpu_kernels()
    assert chosen.name == AS_IS and why in chosen.why
    assert [one.value for one in variables] == before
    assert kernels.current_kernels() == AS_IS


@needs_mkl
@pytest.mark.parametrize("case", ["an old CPU", "nothing is known", "too late"])
def test_what_is_insisted_on_is_refused_where_it_is_not(machine, case):
    given, why = SOFT[case]
    machine(**given)
    with pytest.raises(ConfigError, match=rf"^cpu\.kernels=avx512: .*{re.escape(why)}.*; allowed: auto, as_is$"):
        cpu_kernels("avx512")
    assert kernels._current is None


@needs_mkl
def test_what_is_insisted_on_needs_no_gain(machine):
    machine(gain=0.5)
    assert cpu_kernels("avx512") == Kernels(AVX512, "cpu.kernels=avx512")


def test_an_intel_cpu_has_what_is_insisted_on(machine):
    machine(SOFT["Intel's"][0]["cpu"])
    assert cpu_kernels("avx512").name == cpu_kernels("auto").name == AS_IS
    assert cpu_kernels("avx512").name == AS_IS


def test_another_word(machine):
    with pytest.raises(ConfigError, match="^cpu.kernels=avx10: unknown; allowed: auto, as_is, avx512$"):
        public("avx10")


@pytest.mark.parametrize("code", [b"\x90" * 12, b"\x8b\x05\0\0\0\0" + b"\x90" * 6], ids=["no load", "no test"])
def test_another_mkl_is_left_alone(code):
    buffer = ctypes.create_string_buffer(code, 12)
    with pytest.raises(kernels._Unchanged, match="an MKL that is not known here"):
        kernels._variable(ctypes.addressof(buffer))


FAILING = {
    "it dies": "import os; os.kill(os.getpid(), 4)",
    "it says nothing": "pass",
    "it hangs": "import time; time.sleep(60)",
}


@needs_mkl
def test_a_check_that_cannot_be_started_is_tried_again_another_time(machine, monkeypatch, tmp_path):
    def refused(answer):
        raise OSError(12, "no memory")

    machine()
    monkeypatch.setattr(kernels, "_measured", refused)
    assert cpu_kernels().why == "the check of its products could not be started: [Errno 12] no memory"
    assert not list(tmp_path.glob("cpu_kernels/*.json"))
    machine()
    assert cpu_kernels().name == AVX512


class Check:
    """A check by a program of its own."""

    def __init__(self, program: str):
        self.program, self.calls = program, 0

    def __call__(self, answer: int | None) -> dict[str, Any]:
        self.calls += 1
        words = [sys.executable, "-c", self.program]
        return json.loads(subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout)


@needs_mkl
@pytest.mark.parametrize("how", FAILING)
def test_a_check_that_fails_is_remembered(machine, monkeypatch, tmp_path, how):
    machine()
    monkeypatch.setattr(kernels, "_measured", check := Check(FAILING[how]))
    assert cpu_kernels().why.startswith("the check of its products failed: ")
    monkeypatch.setattr(kernels, "_current", None)
    assert cpu_kernels().name == AS_IS and check.calls == 1


@needs_mkl
@pytest.mark.parametrize("content", ["", "{", "[]", '{"gain": "x"}', '{"gain": -1}', "{}"])
def test_a_damaged_record_is_written_anew(machine, tmp_path, content):
    machine()
    assert cpu_kernels().name == AVX512
    (record,) = tmp_path.glob("cpu_kernels/*.json")
    record.write_text(content)
    machine()
    assert cpu_kernels().name == AVX512
    assert json.loads(record.read_text()) == {"gain": 2.0}


@needs_mkl
def test_without_a_folder_to_write_to(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    machine()
    monkeypatch.setenv("STABILITY_HARNESS_CACHE", str(tmp_path / "file"))
    assert cpu_kernels().name == AVX512


def test_another_cpu_is_checked_anew(machine, tmp_path):
    machine()
    first = kernels._record()
    machine(replace(FAST, model="another"))
    assert kernels._record() != first
