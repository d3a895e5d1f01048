"""What an hour of training costs, as commands take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config import ConfigError

COST = "cost.per_hour=NUMBER, cost.currency=NAME"


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
