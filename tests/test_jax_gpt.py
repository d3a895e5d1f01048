"""The JAX peer of the benchmarks, in a process of its own: JAX has threads, and other tests here fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).with_name("jax_gpt_checks.py")


def test_the_jax_peer_trains_the_same_gpt_as_plain_pytorch() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
