"""Parts that find themselves: a file in a folder of the project, or a module that an installed package names.

A package brings a part along by an entry point in the group `stability_harness.KIND`, as in its pyproject.toml:

    [project.entry-points."stability_harness.clippers"]
    my_clipper = "my_package.my_clipper"

The module is the same file that would stand in the project's own folder. YAML files come along in a package of folders:

    [project.entry-points."stability_harness.conf"]
    my_package = "my_package.conf"

This is the only place that imports by name: what is found here builds on the configuration, which lists the options of
all parts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from harness.basics.errors import ConfigError

T = TypeVar("T")

GROUP = "stability_harness"
KINDS = {
    "branches": "harness.model.branches",
    "optimizers": "harness.optim.optimizers",
    "clippers": "harness.optim.clippers",
    "guards": "harness.guards",
    "objectives": "harness.objectives",
    "faults": "injectors",
    "figures": "analysis.figures",
}
"""The kinds of parts, and the folder of each."""


@cache
def modules(kind: str) -> dict[str, ModuleType]:
    """The modules of a kind by name: those of the project's folder, then those of installed packages.

    Raises ConfigError for two of one name.
    """
    folder = importlib.import_module(KINDS[kind])
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    found = {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}
    for entry in sorted(entry_points(group=f"{GROUP}.{kind}"), key=lambda entry: entry.name):
        if entry.name in found:
            where = found[entry.name].__name__
            given = f"{GROUP}.{kind}: {entry.name} = {entry.value}"
            raise ConfigError(f"{given}: the name is that of {where} already; allowed: another name")
        found[entry.name] = entry.load()
    return found


def folders(kind: str) -> dict[str, Path]:
    """The folder of each package that an installed one names, by who names it. Raises ConfigError for what is none."""
    found = {}
    for entry in sorted(entry_points(group=f"{GROUP}.{kind}"), key=lambda entry: (entry.name, entry.value)):
        given = f"{GROUP}.{kind}: {entry.name} = {entry.value}"
        try:
            found[given] = Path(next(iter(entry.load().__path__)))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{given}: not a package ({error}); allowed: an installed package of folders") from None
    return found


def subclasses(kind: str, base: type[T]) -> dict[str, type[T]]:
    """The classes that modules of a kind define below `base`, the last of each module, by the name of the module."""
    found: dict[str, type[T]] = {}
    for name, module in modules(kind).items():
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, base) and value is not base:
                found[name] = value
    return found


class Words(Sequence[str]):
    """The keys of a table in the code, looked up when they are first needed: `module:NAME`.

    So a new entry of the table is a new choice, and the modules with the tables may build on the configuration.
    """

    def __init__(self, table: str):
        self.table = table

    @cached_property
    def _words(self) -> tuple[str, ...]:
        module, _, name = self.table.partition(":")
        return tuple(getattr(importlib.import_module(module), name))

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __len__(self) -> int:
        return len(self._words)
