"""`cpu.kernels` of a sweep on a CPU that is not Intel's: what is said, what is stored, and what goes on with others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from harness.basics.cpu_kernels import KERNELS, this_cpu
from harness.storage.pack_info import KERNELS_CHANGED
from harness.storage.stored import read_packs
from sweeps.running.job import CHECKPOINTS
from tests.sweeps import command

HAS_ALL = torch.backends.mkl.is_available() and this_cpu().has_avx512
pytestmark = pytest.mark.skipif(not HAS_ALL, reason="needs torch with MKL, and a CPU with AVX-512")
BEST = "avx512"
STRANGER = """
from dataclasses import replace
from harness.basics import cpu_kernels as kernels
kernels.this_cpu = lambda cpu=kernels.this_cpu(): replace(cpu, maker="AuthenticAMD", model="a CPU")
kernels._measured = lambda answer: {"is_right": True, "seconds": 0.5 if answer else 1.0}
"""
WORDS = ("hydra.launcher.workers=1", "out=out")


@pytest.fixture
def stranger(tmp_path: Path) -> dict[str, object]:
    """Where every process of a command takes this CPU for one that is not Intel's."""
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "sitecustomize.py").write_text(STRANGER)
    cache = str(tmp_path / "cache")
    return {"cwd": tmp_path, "path": [tmp_path / "before"], "STABILITY_HARNESS_CACHE": cache}


def kernels(folder: Path) -> list[str]:
    """Of each pack, what it was trained with."""
    return [pack.attributes["environment"][KERNELS] for pack in read_packs(folder / "out")]


def test_one_line_says_why_and_only_where_it_is_asked_for(stranger, tmp_path):
    said = command.end(command.start(*command.tiny("--verbose", *WORDS), **stranger))
    assert f"cpu.kernels: {BEST}: 2.00 times as fast as without\n" in said.out and said.status == 0
    assert kernels(tmp_path) == [BEST]
    other = command.end(command.start(*command.tiny("cpu.kernels=as_is", "out=other", *WORDS[:1]), **stranger))
    assert "kernels" not in other.out + other.err and other.status == 0


def test_workers_train_with_them(stranger, tmp_path):
    """Each in a process of its own."""
    words = command.tiny("seed=range(4)", "pack.size=1", "hydra.launcher.workers=2", "out=out")
    assert command.end(command.start(*words, **stranger)).status == 0
    assert kernels(tmp_path) == [BEST] * 4


def test_packs_that_are_complete_were_trained_with_others(stranger, tmp_path):
    assert command.end(command.start(*command.tiny("cpu.kernels=as_is", *WORDS), **stranger)).status == 0
    said = command.end(command.start(*command.tiny("seed=range(2)", *WORDS), **stranger))
    assert f"this run trains with {BEST}, and packs that are complete were trained with as_is: between them" in said.out
    assert sorted(kernels(tmp_path)) == sorted(["as_is", BEST])


def test_killed_and_gone_on_with_others(stranger, tmp_path):
    """It says so when it goes on, in the store and in `status`."""
    words = command.tiny("train.steps=1200", "checkpoint.every=50", *WORDS)
    killed = command.start(*words, "cpu.kernels=as_is", **stranger)
    folder = tmp_path / "out" / CHECKPOINTS
    command.until(lambda: list(folder.glob("*/*.safetensors")), "a checkpoint")
    os.killpg(killed.pid, signal.SIGKILL)
    command.end(killed)
    said = command.end(command.start(*words, **stranger))
    assert said.status == 0 and "trained with cpu.kernels as_is before step " in said.err
    (pack,) = read_packs(tmp_path / "out")
    note = pack.attributes["environment"][KERNELS_CHANGED]
    assert note.endswith(f", and {BEST} from there on: its bits may differ") and note in said.err
    lines = command.call("status", str(tmp_path / "out")).out.splitlines()
    assert lines[-2:] == ["trained with more than one kind of kernels: 1 pack", f"  {pack.id}  {note}"]
    assert command.call("verify", str(tmp_path / "out")).status is None


def test_what_is_not_there_is_refused_before_anything_is_written(stranger, tmp_path):
    lacking = STRANGER.replace('model="a CPU"', 'model="a CPU", flags=frozenset()')
    (tmp_path / "before" / "sitecustomize.py").write_text(lacking)
    said = command.end(command.start(*command.tiny("cpu.kernels=avx512", *WORDS), **stranger))
    reason = "the CPU (a CPU) lacks AVX-512; allowed: auto, as_is"
    assert (said.status, said.out, said.err) == (2, "", f"error: cpu.kernels=avx512: {reason}\n")
    assert not (tmp_path / "out").exists()
    assert command.end(command.start(*command.tiny(*WORDS), **stranger)).status == 0
    assert kernels(tmp_path) == ["as_is"]
