"""Optimizers: one file each. A new one is a new file here; nothing else needs to know it."""

from __future__ import annotations

from harness import optimizers
from harness.config import modules_of
from harness.optimizers.base import Norms, Optimizer

__all__ = ["OPTIMIZERS", "Norms", "Optimizer"]


def _find() -> dict[str, type[Optimizer]]:
    """Every optimizer that stands in this folder, by the name of its module."""
    found: dict[str, type[Optimizer]] = {}
    for name, module in modules_of(optimizers).items():
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, Optimizer) and value is not Optimizer:
                found[name] = value
    return found


OPTIMIZERS = _find()
