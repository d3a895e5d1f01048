"""Optimizers: one file each. A new one is a new file here; nothing else needs to know it."""

from harness.basics import plugins
from harness.optim.optimizers.base import Norms, Optimizer

__all__ = ["OPTIMIZERS", "Norms", "Optimizer"]

OPTIMIZERS: dict[str, type[Optimizer]] = plugins.subclasses("optimizers", Optimizer)
"""Every optimizer, by the name of its module."""
