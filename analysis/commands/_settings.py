"""Words that several commands take: detectors with constants, and what an hour costs. No command, as its name says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.measures.detectors import options_of
from harness.config import ConfigError
from harness.config.fields import from_yaml

CHOSEN = "detectors, all without any; and constants, detect.NAME.FIELD=VALUE"
COST = "cost.per_hour=NUMBER, cost.currency=NAME"


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


@dataclass(frozen=True)
class Cost:
    """What an hour of training costs."""

    per_hour: float = 0.0
    currency: str = ""


def cost_of(settings: Sequence[str]) -> Cost:
    """From `cost.per_hour=2.5 cost.currency=EUR`. Raises ConfigError."""
    given = {}
    for text in settings:
        key, _, value = text.partition("=")
        if key not in ("cost.per_hour", "cost.currency"):
            raise ConfigError(f"{text:.60}: unknown key; allowed: {COST}")
        given[key] = value
    text = given.get("cost.per_hour", "0")
    try:
        per_hour = float(text)
    except ValueError:
        per_hour = math.nan
    if not (per_hour >= 0 and math.isfinite(per_hour)):
        raise ConfigError(f"cost.per_hour={text:.40}: not a price; allowed: a number, 0 or more")
    return Cost(per_hour, given.get("cost.currency", ""))
