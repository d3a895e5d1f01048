"""What is wrong with a configuration, in words for whoever wrote it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class ConfigError(ValueError):
    """A configuration that cannot be run. Each of its reasons names the key, the value and what is allowed."""

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Problems:
    """Collects the reasons of ConfigErrors, each once, so that all of them are reported and not the first alone."""

    def __init__(self) -> None:
        self.reasons: dict[str, None] = {}

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the reasons of a ConfigError that ends the block."""
        try:
            yield
        except ConfigError as error:
            self.reasons.update(dict.fromkeys(error.reasons))

    def check(self) -> None:
        """Raises one ConfigError with all reasons, if there are any."""
        if self.reasons:
            raise ConfigError(*self.reasons)
