"""What Hydra composes from beside files: the defaults of every key, of each kind of fault, and of what we plug in."""

from __future__ import annotations

from functools import cache
from typing import Any

from harness.config import Trial, sections
from injectors import fault_types
from sweeps.compose import settings


def schema() -> dict[str, Any]:
    """Every key of a sweep with its default.

    The fields of all faults are among them, without a value: they may stand beside any choice of `fault`.
    """
    trial = {name: vars(cls()) for name, cls in sections().items()}
    fault = {name: None for cls in fault_types().values() for name in vars(cls())}
    return {**trial, "seed": Trial().seed, "fault": {**fault, "kind": "none", "name": "none"}, **settings.schema()}


def fault_schemas() -> dict[str, dict[str, Any]]:
    """Defaults of each kind of fault; `none` has no fields."""
    return {kind: {"kind": kind} if kind == "none" else vars(cls()) for kind, cls in fault_types().items()}


@cache
def nodes() -> dict[str, Any]:
    """A mapping, or a dataclass, by the path under which Hydra asks for it.

    Not in Hydra's ConfigStore, of which it makes a deep copy whenever it composes or lists options: with these 60 kB
    that took 40 ms, several times a command. Nor are those of a process's other applications touched.
    """
    faults = {f"fault/{kind}": node for kind, node in fault_schemas().items()}
    plugins = {f"hydra/launcher/{name}": options for name, options in settings.LAUNCHERS.items()}
    return {"schema": schema(), **faults, **plugins, "hydra/sweeper/grid": settings.GridOptions}
