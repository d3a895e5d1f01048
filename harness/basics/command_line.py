"""Command lines that are refused in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from harness.basics.errors import ConfigError

PROGRAM = "stability-harness"


class Parser(argparse.ArgumentParser):
    """argparse's, but what is wrong is a ConfigError, which a command prints as one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        allowed = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ConfigError(f"{self.prog}: {message}; allowed: {allowed}")
