"""The seal of a small JSON file: the SHA-256 of the file itself, under the key `seal`.

It is taken of the whole text with zeros in its own place. So it covers every byte, keys and punctuation included, and
costs one pass over what was read. A file of an earlier version has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.storage.records import Record, Unreadable, parse_json, read_bytes, record_of

SEAL, UNSEALED = "seal", "0" * 64
OTHER = "is damaged (its checksum is another)"
_KEY = f'"{SEAL}":"'


def sealed(text: str) -> bytes:
    """JSON without spaces whose key `seal` is UNSEALED, and the last of that name, with its seal in that place."""
    content = text.encode()
    at = content.rindex((_KEY + UNSEALED).encode()) + len(_KEY)
    return content[:at] + _digest(content).encode() + content[at + len(UNSEALED) :]


def sealed_json(values: Mapping[str, Any]) -> bytes:
    """One JSON object without spaces, sealed."""
    return sealed(json.dumps({**values, SEAL: UNSEALED}, separators=(",", ":")))


def is_sealed(content: bytes) -> bool:
    """Whether a file has a seal. Raises ValueError if it has one, and is not what was sealed."""
    at = content.rfind(_KEY.encode()) + len(_KEY)
    if at < len(_KEY):
        return False
    end = at + len(UNSEALED)
    if _digest(content[:at] + UNSEALED.encode() + content[end:]).encode() != content[at:end]:
        raise ValueError(OTHER)
    return True


def read_sealed_record(path: Path, kind: type[Record], most_bytes: int) -> Record:
    """`read_record` of a file that is sealed, or of an earlier version, which has `kind`'s keys and no others."""
    return sealed_record(read_bytes(path, most_bytes), kind, path)


def sealed_record(content: bytes, kind: type[Record], path: Path, since: tuple[str, ...] = ()) -> Record:
    """What a file or a line holds. One without a seal is of an earlier version, which had no keys of `since`.

    Raises Unreadable.
    """
    try:
        has_seal = is_sealed(content)
    except ValueError as error:
        raise Unreadable(path, str(error)) from None
    values = parse_json(content, path)
    if not has_seal and isinstance(values, dict):
        known = kind.__dataclass_fields__.keys() - set(since)  # type: ignore[attr-defined]
        if unknown := values.keys() - known:
            raise Unreadable(path, f"is damaged (it has no seal, and the key {min(unknown)!r:.40})")
    return record_of(values, kind, path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
