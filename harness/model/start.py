"""Stored weights from which a trial starts (`model.start`), in place of drawn ones: a safetensors file of its tensors.

It is what `keep=weights` leaves (harness/storage/last_weights.py): each tensor by its name, without the trial's axis.
Optimizer, schedule and data begin at step 0. A results folder in place of a file means the weights that a trial of this
model and seed, without a fault, has left there, so that each trial of a sweep goes on from its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.config import NO_FAULT, ConfigError, Trial, shown
from harness.model.heads import VALUE_HEAD
from harness.storage.last_weights import FOLDER, configurations, weights_file

ALLOWED = "a safetensors file of this model's tensors, as keep=weights leaves it"
OF_FOLDER = "a folder in which keep=weights has left one trial of this model and seed without a fault, or a file"


def start_of(trial: Trial) -> str | None:
    """The file with whose weights a trial starts; None: with drawn ones. Raises ConfigError for a folder without it."""
    given = trial.model.start
    if given is None or not (folder := Path(os.path.expanduser(given))).is_dir():
        return given
    of_seeds = _left_in(folder, _newest(folder)).get(_model_of(trial.to_dict()), {})
    known = [name for names in of_seeds.values() for name in names]
    found = of_seeds.get(trial.seed, known if len(known) == 1 else [])
    if len(found) == 1:
        return str(weights_file(folder, found[0]))
    if found:
        why = f"holds several trials of this model with seed={trial.seed}: {', '.join(found[:3])}"
    elif known:
        seeds = ", ".join(map(str, sorted(of_seeds)[:10]))
        why = f"holds weights of this model with seed={seeds}, and none with seed={trial.seed}"
    else:
        why = f"holds no weights of this model (model.width={trial.model.width}, model.depth={trial.model.depth}, ...)"
    raise ConfigError(f"model.start={shown(given)}: {why}; allowed: {OF_FOLDER}")


def _newest(folder: Path) -> int:
    """A number that changes when weights come or go."""
    place = folder / FOLDER
    return place.stat().st_mtime_ns if place.is_dir() else 0


@lru_cache(maxsize=8)
def _left_in(folder: Path, newest: int) -> dict[str, dict[int, list[str]]]:
    """Model -> seed -> ids of the trials without a fault whose weights are there."""
    found: dict[str, dict[int, list[str]]] = {}
    for name, config in configurations(folder).items():
        if config.get("fault", {}).get("kind", NO_FAULT.kind) == NO_FAULT.kind:
            found.setdefault(_model_of(config), {}).setdefault(config.get("seed", 0), []).append(name)
    return found


def _model_of(config: Mapping[str, Any]) -> str:
    """What of a configuration says which model it is."""
    model = {field: value for field, value in config.get("model", {}).items() if field != "start"}
    return json.dumps([model, config.get("data", {}).get("vocabulary"), config.get("block")], sort_keys=True)


def check_start(given: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError for a file whose tensors have other names or shapes than `shapes`; reads no values."""
    with _opened(given, shapes):
        pass


def stored_start(given: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of the file, by name, in the number format in which they are stored.

    Raises ConfigError for other names or shapes than `shapes`, and for values that are not finite.
    """
    with _opened(given, shapes) as file:
        tensors = {name: file.get_tensor(name) for name in shapes if name != VALUE_HEAD or name in file.keys()}  # noqa: SIM118
    for name, values in tensors.items():
        if not values.isfinite().all():
            raise ConfigError(
                f"model.start={shown(given)}: {name} holds values that are not finite; allowed: {ALLOWED}"
            )
    return tensors


def start_digests(trials: Iterable[Trial]) -> dict[str, str]:
    """File -> its SHA-256, of all with which these trials start. Raises ConfigError."""
    digests = {}
    for given in dict.fromkeys(start for trial in trials if (start := start_of(trial)) is not None):
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
    """The file of tensors with these names and shapes; raises ConfigError where it has others.

    A critic's value head may be missing on either side: it is then not read, or starts at zero.
    """
    from safetensors import safe_open

    with _readable(given) as path, safe_open(path, framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
        for name in dict.fromkeys((*shapes, *stored)):
            is_extra = name == VALUE_HEAD and (name in shapes) != (name in stored)
            if shapes.get(name) != stored.get(name) and not is_extra:
                there, wanted = (f"{sizes[name]}" if name in sizes else "none" for sizes in (stored, shapes))
                reason = f"{name} is {there} there and {wanted} in this model"
                raise ConfigError(f"model.start={shown(given)}: {reason}; allowed: {ALLOWED}")
        yield file
