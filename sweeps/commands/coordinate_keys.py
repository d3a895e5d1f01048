"""The keys of a trial that a coordinate check takes."""

from __future__ import annotations

from harness.config import ConfigError
from sweeps.compose.overrides import RUN_KEYS

GROUPS_REFUSED = {
    "fault": "a coordinate check has no faults",
    "detect": "a coordinate check watches for nothing",
    "playbook": "a coordinate check answers no alarms",
    "signals": "a coordinate check stores no signals",
    "study": "a coordinate check is no sweep",
    "search": "a coordinate check is no sweep",
}
ALLOWED = "recipe, mitigation, seed, and keys of model, optim, schedule, train, screen, data and of optimizers"


def check_key(text: str) -> None:
    """Raises ConfigError for a key that a coordinate check has no use for."""
    key = text.partition("=")[0].lstrip("+~")
    group = key.partition(".")[0]
    if group in GROUPS_REFUSED:
        raise ConfigError(f"{text}: {GROUPS_REFUSED[group]}; allowed: {ALLOWED}")
    if key in RUN_KEYS or group == "hydra":
        raise ConfigError(f"{text}: belongs to a sweep; allowed: {ALLOWED}")
    if key == "model.start":
        raise ConfigError(f"{text}: stored weights have one size; allowed: {ALLOWED}")


def is_taken(text: str) -> bool:
    """Whether a check takes the key of KEY=VALUE."""
    try:
        check_key(text)
    except ConfigError:
        return False
    return True
