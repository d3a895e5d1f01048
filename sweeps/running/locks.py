"""Locks on files, which end with the process that holds them, however that ends.

They are those of `filelock` on a descriptor of ours. Its locks of a path would follow a link on the way, not notice a
folder that was moved, and become files that a killed process leaves locked where a file system has no locks. It has no
shared lock, with which many can look at once whether somebody trains without being taken for him: `is_locked`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from typing import TextIO

from filelock import lock_descriptor

from harness.config import ConfigError
from harness.storage.results_folder import FolderLost, ResultsPath


@contextlib.contextmanager
def owned(file: ResultsPath) -> Iterator[bool]:
    """Whether the file is locked for this process for as long as the block lasts; another one may have it."""
    file.parent.make_folder()
    while True:
        handle = os.fdopen(file.descriptor(os.O_RDWR | os.O_CREAT), "a")
        try:
            is_own = lock_descriptor(handle.fileno(), blocking=False)
        except OSError as error:
            is_own = True
            warnings.warn(f"{file}: locks do not work here ({error}); let one command at a time train", stacklevel=4)
        if not is_own:
            handle.close()
            yield False
            return
        in_place, opened = file.status(), os.fstat(handle.fileno())
        if in_place is not None and (in_place.st_dev, in_place.st_ino) == (opened.st_dev, opened.st_ino):
            break
        handle.close()  # its owner removed it between opening and locking: whoever comes now makes a new one
    with handle:
        try:
            yield True
        finally:
            with contextlib.suppress(OSError, FolderLost):
                file.unlink()


def is_locked(file: ResultsPath) -> bool:
    """Whether a process holds the lock; one that has ended holds none."""
    try:
        handle = file.descriptor(os.O_RDONLY)
    except ConfigError:  # a link or the like, which nobody locks
        return False
    except OSError as error:
        return error.errno != errno.ENOENT
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


class Turn:
    """A lock for which others wait: `with turn:`. Also the form in which Optuna's journal wants one."""

    def __init__(self, file: ResultsPath):
        self.file = file
        self._handle: TextIO | None = None

    def acquire(self) -> bool:
        """Wait for it. Signals are heard meanwhile."""
        self.file.parent.make_folder()
        self._handle = handle = os.fdopen(self.file.descriptor(os.O_RDWR | os.O_CREAT), "a")
        with contextlib.suppress(OSError):  # locks do not work here: `owned` says so
            lock_descriptor(handle.fileno(), poll_interval=0.01)
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
