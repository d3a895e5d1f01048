"""Small files of a results folder, read as what they are: data that anybody may have written.

Each kind of file is a frozen dataclass, and `read_record` the one door: a file that is none, is too large, is not JSON,
nests too deeply, lacks a key or has a value of another type is `Unreadable`, with its name and the reason. A field
without a default has to be there; keys that the dataclass does not know are left out. What types do not say, its
`__post_init__` checks, by a ValueError.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import stat
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union

MOST_BYTES = 2**20
LARGEST = 2**63 - 1
_LETTERS = 40  # of a wrong value, in a reason
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}

Record = TypeVar("Record")


class Unreadable(Exception):
    """A file that is not what it should be."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class Missing(Unreadable):
    """There is no such file."""


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, is_cut: bool = False) -> bytes:
    """What is in a regular file; of a larger one the first `most_bytes`, if `is_cut`.

    Never waits, as opening a FIFO would, and follows no symbolic link. Raises Unreadable.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte in the name
        raise Missing(path, str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(path, "there is no such file") from None
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        raise Unreadable(path, "is a symbolic link" if is_link else f"cannot be read ({error.strerror})") from None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(path, "is no regular file")
        if status.st_size > most_bytes and not is_cut:
            raise Unreadable(path, f"has more than {most_bytes} bytes")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(most_bytes)
    except OSError as error:
        raise Unreadable(path, f"cannot be read ({error.strerror})") from None
    finally:
        os.close(handle)


def parse_json(content: bytes, path: Path) -> Any:
    """The value of some JSON from the file `path`. Raises Unreadable."""
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise Unreadable(path, "nests too deeply") from None
    except ValueError as error:
        raise Unreadable(path, f"is not JSON ({str(error)[: 2 * _LETTERS]})") from None


def read_lines(path: Path, most_bytes: int = MOST_BYTES) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one a line; a last line without an end is being written, and left out.

    Raises Unreadable.
    """
    objects = []
    for number, line in enumerate(read_bytes(path, most_bytes).split(b"\n")[:-1], start=1):
        try:
            values = parse_json(line, path)
        except Unreadable as error:
            raise Unreadable(path, f"line {number} {error.reason}") from None
        if not isinstance(values, dict):
            raise Unreadable(path, f"line {number} is no JSON object")
        objects.append(values)
    return objects


def read_record(path: Path, kind: type[Record], most_bytes: int = MOST_BYTES) -> Record:
    """The JSON file `path` as a `kind`, a dataclass. Raises Unreadable; Missing where there is no such file."""
    return record_of(parse_json(read_bytes(path, most_bytes), path), kind, path)


def record_of(values: Any, kind: type[Record], path: Path) -> Record:
    """Parsed JSON from the file `path` as a `kind`. Raises Unreadable."""
    try:
        record: Record = _record(values, kind, "")
        return record
    except ValueError as error:
        raise Unreadable(path, str(error)) from None


# --- values against types ----------------------------------------------------------------------------------------


_hints = cache(typing.get_type_hints)


def _record(values: Any, kind: Any, place: str) -> Any:
    if not isinstance(values, dict):
        raise _wrong(place, values, "an object with keys")
    fields = {}
    for field in dataclasses.fields(kind):
        where = f"{place}.{field.name}" if place else field.name
        if field.name in values:
            fields[field.name] = _value(values[field.name], _hints(kind)[field.name], where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} is missing")
    return kind(**fields)


def _value(value: Any, hint: Any, place: str) -> Any:
    """`value` as the type `hint` has it: a scalar, `X | None`, tuple[X, ...], Mapping[str, X], a dataclass, or Any."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        *others, last = (part for part in parts if part is not NoneType)
        for other in others:
            with contextlib.suppress(ValueError):
                return _value(value, other, place)
        return _value(value, last, place)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(place, value, "a list")
        return tuple(_value(item, parts[0], f"{place}[{number}]") for number, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(place, value, "an object with keys")
        return {key: _value(item, parts[1], f"{place}[{_short(key)}]") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _record(value, hint, place)
    if hint in (int, float) and type(value) is int and abs(value) > LARGEST:
        raise ValueError(f"{place} is beyond 64 bits")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _wrong(place, value, _KINDS[hint])
    return value


def _wrong(place: str, value: Any, wanted: str) -> ValueError:
    what = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else _short(value)
    return ValueError(f"{place or 'it'} is {what}, not {wanted}")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number beyond 64 bits"
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."
