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

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Collection, Iterator, Sequence
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
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
    "readings": "harness.readings",
    "guards": "harness.guards",
    "detectors": "harness.detectors",
    "actions": "harness.recovery",
    "rewards": "harness.rewards",
    "objectives": "harness.objectives",
    "faults": "injectors",
    "figures": "analysis.figures",
    "forecasters": "analysis.forecasts",
    "exports": "analysis.export.targets",
    "commands": "analysis.commands",
}
"""The kinds of parts, and the folder of each."""
CONF = Path(__file__).parents[2] / "sweeps" / "conf"  # our own YAML files, which are read as data


@cache
def modules(kind: str) -> dict[str, ModuleType]:
    """The modules of a kind by name: those of the project's folder, then those of installed packages.

    Raises ConfigError for two of one name.
    """
    folder = importlib.import_module(KINDS[kind])
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    parts = {name: importlib.import_module(f"{folder.__name__}.{name}") for name in names}
    for given, entry in _given(kind):
        if entry.name in parts:
            raise _taken(given, parts[entry.name].__name__)
        parts[entry.name] = entry.load()
    return parts


def module(kind: str, name: str) -> ModuleType:
    """One module of a kind, for what needs no other: of the project's folder, or of an installed package."""
    if importlib.util.find_spec(f"{KINDS[kind]}.{name}"):
        return importlib.import_module(f"{KINDS[kind]}.{name}")
    loaded: ModuleType = next(entry for _, entry in _given(kind) if entry.name == name).load()
    return loaded


def texts(kind: str, name: str, reserved: Collection[str] = ()) -> dict[str, str]:
    """A constant text of each module of a kind, by the name of the module. Those of our own folder are not imported.

    Raises ConfigError for two of one name, and for one that is `reserved`.
    """
    folder = importlib.util.find_spec(KINDS[kind])
    found: dict[str, str] = {}
    for place in (folder and folder.submodule_search_locations) or ():
        for file in sorted(Path(place).glob("[!_]*.py")):
            found.update((file.stem, value) for target, value in _constants(file) if target == name)
    for given, entry in _given(kind):
        if entry.name in found or entry.name in reserved:
            raise _taken(given, f"{KINDS[kind]}.{entry.name}" if entry.name in found else entry.name)
        found[entry.name] = _text_of(given, entry, name)
    return found


def _text_of(given: str, entry: EntryPoint, name: str) -> str:
    try:
        text = getattr(entry.load(), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{given}: cannot be loaded ({error}); allowed: a module with {name}") from None
    if not isinstance(text, str):
        raise ConfigError(f"{given}: its {name} is no text; allowed: a module with {name}, a text")
    return text


def _taken(given: str, where: str) -> ConfigError:
    return ConfigError(f"{given}: the name is that of {where} already; allowed: another name")


def _constants(file: Path) -> Iterator[tuple[str, str]]:
    """`NAME = "text"` of a module, read as data."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((target.id, node.value.value) for target in node.targets if isinstance(target, ast.Name))


def _given(kind: str) -> list[tuple[str, EntryPoint]]:
    """The entry points of installed packages, by name, each as its package says it."""
    entries = sorted(entry_points(group=f"{GROUP}.{kind}"), key=lambda entry: (entry.name, entry.value))
    return [(f"{GROUP}.{kind}: {entry.name} = {entry.value}", entry) for entry in entries]


def folders(kind: str) -> dict[str, Path]:
    """The folder of each package that an installed one names, by who names it. Raises ConfigError for what is none."""
    places = {}
    for given, entry in _given(kind):
        try:
            places[given] = Path(next(iter(entry.load().__path__)))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{given}: not a package ({error}); allowed: an installed package of folders") from None
    return places


def conf_file(group: str, name: str) -> Path | None:
    """The YAML file of a choice such as fault=weight_bit, ours or that of an installed package; None: there is none."""
    files = (folder / group / f"{name}.yaml" for folder in (CONF, *folders("conf").values()))
    return next((file for file in files if file.is_file()), None)


def conf_names(group: str) -> list[str]:
    """The names of all those files."""
    places = (CONF, *folders("conf").values())
    return sorted({file.stem for folder in places for file in (folder / group).glob("*.yaml")})


def subclasses(kind: str, base: type[T]) -> dict[str, type[T]]:
    """The classes that modules of a kind define below `base`, the last of each module, by the name of the module."""
    return {
        name: value
        for name, module in modules(kind).items()
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
        if issubclass(value, base) and value is not base
    }


class TableKeys(Sequence[str]):
    """The keys of a table in the code, looked up when they are first needed: `module:NAME`.

    So a new entry of the table is a new choice, and the modules with the tables may build on the configuration.
    """

    def __init__(self, table: str):
        self.table = table

    @cached_property
    def _keys(self) -> tuple[str, ...]:
        module, _, name = self.table.partition(":")
        return tuple(getattr(importlib.import_module(module), name))

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index]

    def __len__(self) -> int:
        return len(self._keys)
