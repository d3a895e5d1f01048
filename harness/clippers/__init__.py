"""Clippers of gradients: one file each. A new one is a new file here; nothing else needs to know it."""

from __future__ import annotations

from harness import clippers
from harness.clippers.base import Clipper
from harness.config import modules_of

__all__ = ["CLIPPERS", "Clipper"]


def _find() -> list[type[Clipper]]:
    """Every clipper that stands in this folder, in the order in which they act."""
    for _ in modules_of(clippers):
        pass
    return sorted(Clipper.__subclasses__(), key=lambda cls: (cls.order, cls.__name__))


CLIPPERS = _find()
