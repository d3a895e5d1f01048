"""The files that data are read from, and the one line for those that cannot serve."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from harness.basics.memory import in_units, main_memory
from harness.basics.printing import count, printable
from harness.config import ConfigError, Data
from harness.data.tokenizer import Tokens

BYTES_PER_TOKEN = 4  # the tokens, and a copy for batches

Piece = TypeVar("Piece", bytes, Tokens)


@dataclass
class LeftOut:
    """Files of a folder that are not read, hidden ones apart: how many, their bytes, and the first of them.

    A link to a folder counts as one file of no bytes.
    """

    files: int = 0
    bytes: int = 0
    first: str = ""  # its name under the folder
    why: str = ""  # that one is left out

    def add(self, name: str, size: int, why: str) -> None:
        if not self.files:
            self.first, self.why = printable(name), why
        self.files += 1
        self.bytes += size

    def said(self, read: int) -> str:
        """In words, beside `read` bytes that are read; empty if nothing is left out."""
        if not self.files:
            return ""
        whole = self.bytes + read
        return f"{count(self.files, 'file')} left out, {self.bytes:,} of {whole:,} bytes; {self.named}"

    @property
    def named(self) -> str:
        """The first of them, and why."""
        return f"the first: {self.first} ({self.why})"

    def to_dict(self) -> dict[str, Any]:
        """As it is stored with the results."""
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class CorpusParts(Generic[Piece]):
    """The pieces that make up each part, how many files were left out because they repeat another, and which others."""

    train: list[Piece]
    validation: list[Piece]
    repeated: int
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes or tokens of each part."""
        return {"train": size_of(self.train), "validation": size_of(self.validation)}

    @property
    def files(self) -> dict[str, int]:
        """How many pieces each part has, and how many were left out."""
        return {"train": len(self.train), "validation": len(self.validation), "repeated": self.repeated}


def size_of(pieces: Sequence[bytes] | Sequence[Tokens]) -> int:
    """Bytes or tokens of all pieces together."""
    return sum(len(piece) for piece in pieces)


def refuse(data: Data, reason: str, allowed: str) -> NoReturn:
    """Raise the ConfigError for data that cannot serve, by the key that says which they are."""
    keys = {"stdlib": f"data.source={data.source}", "zipf": f"data.length={data.length}"}
    raise ConfigError(f"{keys.get(data.source, f'data.path={data.path}')}: {reason}; allowed: {allowed}")


def check_memory(data: Data, needed: int) -> None:
    """Raise ConfigError for more than this machine's memory can hold: a process that asks for it would be killed."""
    if needed > (memory := main_memory()):
        reason = f"takes about {in_units(needed)} of memory"
        refuse(data, reason, f"at most the {in_units(memory)} of this machine: less data")


def path_of(data: Data) -> Path:
    """The file or folder of `data.path`, where `~` is the user's own. Raises ConfigError for anything else."""
    path = Path(os.path.expanduser(data.path or ""))  # Path's own raises an error where there is no such user
    reason = "no such file or folder"
    try:
        mode = os.stat(path).st_mode if data.path else 0
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return path
        reason = "neither a file nor a folder" if mode else reason
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    except ValueError as error:
        reason = f"no name of a file ({error})"
    refuse(data, reason, f"a file or a folder, for data.source={data.source}")


def walk(folder: Path, skip: Sequence[str] = (), left_out: LeftOut | None = None) -> Iterator[tuple[str, Path]]:
    """(name under the folder, path) of the files that are not hidden, nor in folders `skip`, in order of the names.

    Links to folders are not followed. They and names that are no file are added to `left_out`.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    paths = []
    for root, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("__pycache__", *skip)]
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        paths += [Path(root, name) for name in (*files, *links) if not name.startswith(".")]
    named = sorted((path.relative_to(folder).as_posix(), path) for path in paths)
    if left_out is not None:
        for name, path in named:
            if not path.is_file():
                left_out.add(name, 0, "a link to a folder" if path.is_dir() else "no file that can be opened")
    return ((name, path) for name, path in named if path.is_file())
