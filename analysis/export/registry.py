"""The targets by name: each is a subclass of `Target` in a file of `analysis/export/targets`, and finds itself.

An installed package may bring one along (harness/basics/plugins.py).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import ClassVar

from analysis.export.runs import Source
from harness.basics import plugins
from harness.config import ConfigError


class Target(ABC):
    """Where a sweep is exported to. Its library is imported in `write`, and nowhere before."""

    about: ClassVar[str]  # in a few words
    extra: ClassVar[str | None] = None  # of the package, that brings its library

    @abstractmethod
    def write(self, source: Source, place: Path) -> list[str]:
        """Bring the folder `place`, which is there, up to date. Gives what was done, a line each.

        Raises ConfigError for what is wrong with the folder, and OSError where it cannot be written to.
        """


@cache
def targets() -> dict[str, type[Target]]:
    """By name."""
    return plugins.subclasses("exports", Target)  # type: ignore[type-abstract]


@contextlib.contextmanager
def needed(name: str, extra: str) -> Iterator[None]:
    """Imports of a library that need not be there. Raises ConfigError if it is not."""
    try:
        yield
    except ImportError as error:
        missing = error.name or str(error)
        allowed = f"pip install 'stability-harness[{extra}]'"
        raise ConfigError(f"--to {name}: {missing} is not installed; allowed: {allowed}") from None
