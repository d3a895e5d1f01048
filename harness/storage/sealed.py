"""One safetensors file that holds tensors and, in its metadata, JSON and the SHA-256 of all: damage is found out.

The library is loaded where a file is written or read: packs are trained without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from harness.basics.tensor_bytes import byte_view

SEAL = "sealed"  # the only key: several would stand in an order that changes from file to file
OTHER = "is damaged: its checksum is another"


class Damaged(Exception):
    """A file that cannot be used, and why."""


def write_sealed(path: Path, tensors: Mapping[str, Tensor], values: Any, version: int) -> None:
    """Equal content gives equal bytes. Raises OSError and SafetensorError."""
    from safetensors.torch import save_file

    kept = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    body = json.dumps({"version": version, "values": values, "tensors": _digest(kept)})
    save_file(kept, path, {SEAL: f"{_hash(body)} {body}"})


def read_sealed(path: Path, version: int) -> tuple[dict[str, Tensor], Any]:
    """The tensors and the values. Raises Damaged, and OSError as opening does."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    body = _body(path, version)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise _damaged(error) from None
    if _digest(tensors) != body["tensors"]:
        raise Damaged(OTHER)
    return tensors, body["values"]


def values_of(path: Path, version: int) -> Any:
    """The values alone, which have a checksum of their own. Raises as `read_sealed` does."""
    return _body(path, version)["values"]


def _body(path: Path, version: int) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            digest, _, body = (file.metadata() or {}).get(SEAL, "").partition(" ")
        if digest != _hash(body):
            raise Damaged(OTHER if digest else "has no checksum: no file of this version")
        content = json.loads(body)
        if content["version"] == version:
            return {name: content[name] for name in ("tensors", "values")}
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise _damaged(error) from None
    raise Damaged(f"is of version {content['version']}, and {version} is read")


def _damaged(error: Exception) -> Damaged:
    return Damaged(f"is damaged ({type(error).__name__}: {error})")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(byte_view(x).numpy().data)
    return digest.hexdigest()
