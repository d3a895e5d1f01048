"""What belongs to the run and not to a trial: where results go, on what, in how large packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config import STRUCTURAL, ConfigError, anything, checked, choice, number


@dataclass(frozen=True)
class Settings:
    """The run's own fields, as `key=value` on the command line; they cannot be swept."""

    out: str | None = anything(STRUCTURAL, None, "folder of the results; null: results/<study>")
    device: str = choice(
        STRUCTURAL, "auto", "where to train; auto: the accelerator if there is one", "auto", "cpu", "cuda"
    )
    plan: bool = anything(STRUCTURAL, False, "print the plan and train nothing")
    wait: bool = anything(STRUCTURAL, True, "wait for submitted jobs; false: return at once")


@dataclass(frozen=True)
class PackSettings:
    """`pack.*`: how trials are put together."""

    size: str = anything(STRUCTURAL, "auto", "trials in a pack; auto: from shape and device")


@dataclass(frozen=True)
class TelemetrySettings:
    """`telemetry.*`: what is measured and how often it is written."""

    block: int = number(STRUCTURAL, 50, "steps between writes to the store", low=1)


PARTS: dict[str, type] = {"pack": PackSettings, "telemetry": TelemetrySettings}


@dataclass(frozen=True)
class Run:
    """The checked settings of one run."""

    study: str
    out: Path
    device: str
    plan: bool
    wait: bool
    pack_size: int | None  # None: auto
    block: int


def schema() -> dict[str, Any]:
    """Every key of the run and its default."""
    root = {name: field.default for name, field in Settings.__dataclass_fields__.items()}
    return {**root, **{part: vars(cls()) for part, cls in PARTS.items()}}


def run_from(study: str, values: Mapping[str, Any]) -> Run:
    """Check the run's keys. Raises ConfigError."""
    root = {name: checked(name, Settings, name, values[name]) for name in Settings.__dataclass_fields__}
    block = checked("telemetry.block", TelemetrySettings, "block", values["telemetry"]["block"])
    out = Path(root["out"] or f"results/{study}").absolute()
    size = values["pack"]["size"]
    if size != "auto" and (type(size) is not int or size < 1):
        raise ConfigError(f"pack.size={size}: allowed: auto, or an integer from 1 up")
    return Run(study, out, root["device"], root["plan"], root["wait"], None if size == "auto" else size, block)
