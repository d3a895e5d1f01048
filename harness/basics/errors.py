"""What is wrong with a configuration or a command line, in words for whoever wrote it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

PROGRAM = "stability-harness"


class ConfigError(ValueError):
    """A configuration that cannot be run. Each of its reasons names the key, the value and what is allowed."""

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def nearest(name: str, known: Iterable[str]) -> str:
    """The question whether another name was meant, with a space behind it; empty where none is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
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
        allowed = " ".join(self.format_usage().split()).removeprefix("usage: ")
        if known:  # argparse counts those among them of which there may be none
            spare = {str(action.metavar or action.dest) for action in self._actions if action.nargs in ("*", "?")}
            missing = [name for name in names.split(", ") if name not in spare]
            message = required + known + ", ".join(missing)
            chosen = [action for action in self._actions if action.choices and _name(action) in missing]
            allowed += "".join(f"; {_name(one)}: {', '.join(one.choices or ())}" for one in chosen)
        raise ConfigError(f"{self.prog}: {message}; {self._meant(message)}allowed: {allowed}")

    def _meant(self, message: str) -> str:
        """Whether an option was meant that is written like the first one that is unknown."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        first = words.partition(" ")[0].partition("=")[0]
        return nearest(first, self._option_string_actions) if is_unknown and first.startswith("-") else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ConfigError for what is none of the choices of an argument."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            reason = f"argument {_name(action)}: invalid choice: {value!r:.60}"
            raise ConfigError(f"{self.prog}: {reason}; {nearest(str(value), known)}allowed: {', '.join(known)}")


def _name(action: argparse.Action) -> str:
    """An argument as messages and usage name it."""
    return "/".join(action.option_strings) or str(action.metavar or action.dest)
