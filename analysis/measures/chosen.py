"""Detectors and their constants, as the commands `detectors` and `leaderboard` take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.measures.detectors import options_of
from harness.config import ConfigError
from harness.config.fields import from_yaml

CHOSEN = "detectors, all without any; and constants, detect.NAME.FIELD=VALUE"


def chosen_detectors(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The detectors of a command line, none for all, and the constants given to each. Raises ConfigError."""
    names = [text for text in words if "=" not in text]
    constants: dict[str, dict[str, Any]] = {}
    for text in words:
        key, is_given, value = text.partition("=")
        group, _, field = key.rpartition(".")
        if is_given and not group.startswith("detect."):
            raise ConfigError(f"{text}: unknown key; allowed: detect.NAME.FIELD=VALUE")
        if is_given:
            constants.setdefault(group.removeprefix("detect."), {})[field] = from_yaml(value)
    for name, fields in constants.items():
        options_of(name, fields)
        is_there = any(name in one.split("+") for one in names)
        names = names if is_there or not names else [*names, name]
    return names, constants
