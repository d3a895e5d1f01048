"""Names that a package of a user's may still ask for, and that are others now."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


def names(module: str, **now: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module: each old name gives what its new one is, with a warning, for one version."""

    def found(name: str) -> Any:
        if name not in now:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is called {now[name]} now", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], now[name])

    return found
