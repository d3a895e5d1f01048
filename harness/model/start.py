"""Stored weights from which a trial starts (`model.start`), in place of drawn ones: a safetensors file of its tensors.

It is what `keep=weights` leaves (harness/storage/last_weights.py): each tensor by its name, without the trial's axis.
Optimizer, schedule and data begin at step 0.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.config import ConfigError, Trial, shown

ALLOWED = "a safetensors file of this model's tensors, as keep=weights leaves it"


def check_start(given: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError for a file whose tensors have other names or shapes than `shapes`; reads no values."""
    with _opened(given, shapes):
        pass


def stored_start(given: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of the file, by name, in the number format in which they are stored.

    Raises ConfigError for other names or shapes than `shapes`, and for values that are not finite.
    """
    with _opened(given, shapes) as file:
        tensors = {name: file.get_tensor(name) for name in shapes}
    for name, values in tensors.items():
        if not values.isfinite().all():
            raise ConfigError(
                f"model.start={shown(given)}: {name} holds values that are not finite; allowed: {ALLOWED}"
            )
    return tensors


def start_digests(trials: Iterable[Trial]) -> dict[str, str]:
    """`model.start` as given -> the SHA-256 of that file, for all that these trials name. Raises ConfigError."""
    digests = {}
    for given in dict.fromkeys(trial.model.start for trial in trials if trial.model.start is not None):
        with _readable(given) as path:
            stat = path.stat()
            digests[given] = _digest(path, stat.st_mtime_ns, stat.st_size)
    return digests


@lru_cache
def _digest(path: Path, mtime: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _readable(given: str) -> Iterator[Path]:
    from safetensors import SafetensorError  # drawn weights need none of it

    path = Path(os.path.expanduser(given))
    try:
        if not path.is_file():
            raise ConfigError(f"model.start={shown(given)}: no such file; allowed: {ALLOWED}")
        yield path
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model.start={shown(given)}: cannot be read ({error}); allowed: {ALLOWED}") from None


@contextmanager
def _opened(given: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Any]:
    """The file of tensors with these names and shapes; raises ConfigError where it has others."""
    from safetensors import safe_open

    with _readable(given) as path, safe_open(path, framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
        for name in dict.fromkeys((*shapes, *stored)):
            if shapes.get(name) != stored.get(name):
                there, wanted = (f"{sizes[name]}" if name in sizes else "none" for sizes in (stored, shapes))
                reason = f"{name} is {there} there and {wanted} in this model"
                raise ConfigError(f"model.start={shown(given)}: {reason}; allowed: {ALLOWED}")
        yield file
