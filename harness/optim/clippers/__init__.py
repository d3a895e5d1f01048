"""Clippers of gradients: one file each. A new one is a new file here; nothing else needs to know it."""

from harness.basics import plugins
from harness.optim.clippers.base import Clipper, first_to_repair

__all__ = ["CLIPPERS", "Clipper", "first_to_repair"]

CLIPPERS = sorted(plugins.subclasses("clippers", Clipper).values(), key=lambda cls: (cls.order, cls.__name__))
"""Every clipper, in the order in which they act."""
