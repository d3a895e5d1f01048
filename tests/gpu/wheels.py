"""Packages that `make gpu-wheels` has fetched, for a machine that has torch and no network."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

NEEDED = (  # what checks and the figure load, beside torch
    "numpy",
    "safetensors",
    "hydra",
    "omegaconf",
    "antlr4",
    "yaml",
    "google_crc32c",
    "tokenizers",
    "platformdirs",
    "pebble",
    "filelock",
    "rich",
)


def lacking(names: Iterable[str]) -> list[str]:
    """The modules of these that cannot be loaded; none is."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def put_on_path(folder: Path, names: Iterable[str]) -> None:
    """Unpack the wheels of a folder behind everything else on the path, if any of these modules is missing."""
    found = sorted(folder.glob("*.whl"))
    if not found or not lacking(names):
        return
    place = tempfile.mkdtemp(prefix="gpu-wheels-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", place, *map(str, found)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"warning: {folder}: not unpacked: {done.stderr.strip()}", file=sys.stderr)
    sys.path.append(place)
    importlib.invalidate_caches()
