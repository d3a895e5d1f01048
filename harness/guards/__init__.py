"""Guards: one file each. A guard sees the end of each gradient's way, and says for each row whether it goes on.

A new one is a new file here, or a module of an installed package; nothing else needs to know it. What a guard answers
is done by harness/training; it sees numbers of rows alone, and neither the pack nor the loop.
"""

from harness.basics import plugins, renamed
from harness.guards.base import ASK, FREEZE, GO, GO_AND_ASK, ROLL_BACK, SKIP, Guard, GuardInput, GuardSignal, Parts

GUARDS = sorted(plugins.subclasses("guards", Guard).values(), key=lambda cls: (cls.order, cls.__name__))
"""Every guard, in the order in which they are asked."""

__getattr__ = renamed.names(__name__, Seen="GuardInput")

__all__ = [
    "ASK",
    "FREEZE",
    "GO",
    "GO_AND_ASK",
    "GUARDS",
    "Guard",
    "GuardSignal",
    "GuardInput",
    "Parts",
    "ROLL_BACK",
    "SKIP",
]
