"""Injectors: one file a family of faults. A new one is a new file here; nothing else needs to know it."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from harness.config import Fault
from injectors.fault import FaultContext, InjectableFault

__all__ = ["FaultContext", "InjectableFault", "fault_types"]


@cache
def fault_types() -> dict[str, type[Fault]]:
    """Every kind of fault that stands in this folder, by name, and `none`."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found: dict[str, type[Fault]] = {"none": Fault}
    pending = InjectableFault.__subclasses__()
    for cls in pending:
        pending += cls.__subclasses__()
        if (kind := cls().kind) != "none":  # else: a base of others
            found[kind] = cls
    return found
