"""Locks on files, which end with the process that holds them, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def owned(file: Path) -> Iterator[bool]:
    """Whether the file is locked for this process for as long as the block lasts; another one may have it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            warnings.warn(f"{file}: locks do not work here ({error}); let one command at a time train", stacklevel=4)
        try:
            yield True
        finally:
            file.unlink(missing_ok=True)  # whoever locks the new one finds what this one left


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock; one that has ended holds none."""
    try:
        with file.open("r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class Turn:
    """A lock for which others wait: `with turn:`. Also the form in which Optuna's journal wants one."""

    def __init__(self, file: Path):
        self.file = file
        self._handle: TextIO | None = None

    def acquire(self) -> bool:
        """Wait for it. Signals are heard meanwhile."""
        self._handle = handle = self.file.open("a")
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # locks do not work here: `owned` says so
                return True

    def release(self) -> None:
        """Let the next one have it."""
        assert self._handle is not None
        self._handle.close()
        self._handle = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
