"""What is wrong with a configuration or a command line, in words for whoever wrote it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

PROGRAM = "stability-harness"


class ConfigError(ValueError):
    """A configuration that cannot be run. Each of its reasons names the key, the value and what is allowed."""

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def nearest(name: str, known: Sequence[str]) -> str:
    """The question whether another name was meant, with a space behind it; empty where none is like it."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}? " if close else ""


class Problems:
    """Collects the reasons of ConfigErrors, each once, so that all of them are reported and not the first alone."""

    def __init__(self) -> None:
        self.reasons: dict[str, None] = {}

    def collect(self) -> Problems:
        """Keep the reasons of a ConfigError that ends the block."""
        return self

    def __enter__(self) -> None:
        """A block begins."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.reasons.update(dict.fromkeys(error.reasons))
        return True

    def check(self) -> None:
        """Raises one ConfigError with all reasons, if there are any."""
        if self.reasons:
            raise ConfigError(*self.reasons)


class Parser(argparse.ArgumentParser):
    """argparse's, but what is wrong is a ConfigError, which a command prints as one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        required, known, names = message.partition("are required: ")
        if known:  # argparse counts those among them of which there may be none
            spare = {str(action.metavar or action.dest) for action in self._actions if action.nargs in ("*", "?")}
            message = required + known + ", ".join(name for name in names.split(", ") if name not in spare)
        allowed = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ConfigError(f"{self.prog}: {message}; allowed: {allowed}")
