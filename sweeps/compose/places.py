"""What a choice of a study, recipe, mitigation, fault, detector or playbook may be, and where that stands.

It is a file of our folder, an installed package's or a user's own; several mitigations joined by `+`; or, beside files,
a kind of fault with its defaults.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from harness.basics import plugins
from harness.basics.errors import nearest
from harness.config import ConfigError, Problems, Trial, sections, shown
from harness.detectors.table import DETECTORS
from harness.objectives.table import OBJECTIVES
from injectors import fault_types
from sweeps.compose import settings
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.yaml_files import has_control, short, text_of, tree_of

GROUPS = ("study", "recipe", "mitigation", "fault", "playbook")  # whose options are files
JOINED = ("mitigation", "detect")  # groups of which several options may be chosen at once, joined by +
TAKEN = ("config.yaml", "schema.yaml", "hydra", "hydra_plugins", "search")  # what a user's folder has none of
LISTED = ("study", "search", "recipe", "mitigation", "fault", "detect", "playbook")  # whose options `list` shows
NONE = "none"
PLAIN = "plain"  # the recipe of harness/config/model.py and recipe.py as it is
MOST_NAMES = 50  # that an error lists; beyond it a line would be a page
MOST_BESIDE_A_HINT = 10  # that it lists behind the nearest one
WANTED = (
    "a folder with studies in study/, recipes in recipe/, mitigations in mitigation/, faults in fault/ or playbooks in "
    "playbook/"
)


def named(folder: str | None) -> Path | None:
    """The value of --config-dir as a path. Raises ConfigError if it is empty, which is no name for this folder here."""
    if folder == "":
        reason = "empty, as where a shell's variable is not set"
        raise ConfigError(f"--config-dir=: {reason}; allowed: {WANTED}")
    return None if folder is None else Path(folder)


def places(folder: Path | None = None) -> list[Path]:
    """Where files of `GROUPS` are: our folder, those of installed packages, and a user's own. Raises ConfigError."""
    return [*shipped(), *([folder] if folder else [])]


@cache
def shipped() -> tuple[Path, ...]:
    """Our folder and those of installed packages. Raises ConfigError for files in these that stand in for others'."""
    folders, problems = [FOLDER], Problems()
    for given, path in plugins.folders("conf").items():
        with problems.collect():
            _check_files(given, path, folders)
        folders.append(path)
    problems.check()
    return tuple(folders)


def check_folder(folder: Path | None) -> None:
    """Raises ConfigError for a --config-dir that is none, or has what would stand in for files that there are."""
    if folder is None:
        return
    given = f"--config-dir={short(str(folder))}"
    if wrong := _why_none(folder):
        raise ConfigError(f"{given}: {wrong}; allowed: {WANTED}")
    _check_files(given, folder, places())


def _check_files(given: str, folder: Path, others: Sequence[Path]) -> None:
    """Raises ConfigError for names of files in a folder that this program or `others` have already."""
    problems = Problems()
    for name in TAKEN:
        if os.path.lexists(folder / name):
            reason = f"its {name} would take the place of this program's own"
            problems.reasons[f"{given}: {reason}; allowed: {WANTED}"] = None
    for group in GROUPS:
        with problems.collect():
            taken = dict.fromkeys(fault_types() if group == "fault" else (), FOLDER)
            taken |= {name: other for other in reversed(others) for name in stems(other / group)}
            for name in stems(folder / group):
                reason = f"there is a {group} of that name already" if name in taken else ""
                reason += f" in {taken[name]}" if taken.get(name, FOLDER) != FOLDER else ""
                reason = "control characters in its name" if has_control(name) else reason
                if reason:
                    problems.reasons[f"{given}: {group}/{name}.yaml: {reason}; allowed: another name"] = None
    problems.check()


def _why_none(folder: Path) -> str | None:
    """Why a path is no folder that can be searched; None if it is one."""
    if has_control(str(folder)) or "${" in str(folder):
        return "control characters or ${ in its name"
    try:
        return None if stat.S_ISDIR(folder.stat().st_mode) else "no folder"
    except (FileNotFoundError, NotADirectoryError):
        return "no such folder"
    except OSError as error:
        return (error.strerror or "cannot be read").lower()


def place_of(group: str, name: str, folder: Path | None) -> Path | None:
    """The first of `places` with a file of this name; None if there is none, as for a kind of fault."""
    return next((place for place in places(folder) if (place / group / f"{name}.yaml").is_file()), None)


def is_general(group: str, name: str, folder: Path | None) -> bool:
    """Whether an option is for any objective: its file sets no field of a single one, such as `policy.*`."""
    place = place_of(group, name, folder)
    if place is None:
        return True
    file = place / group / f"{name}.yaml"
    return not tree_of(file, text_of(file)).keys() & {"objective", *OBJECTIVES}


def options(group: str, folder: Path | None = None) -> list[str]:
    """The names that a choice of a group has, as Hydra would list them. Raises ConfigError."""
    kinds = {path.partition("/")[2] for path in nodes() if path.startswith(f"{group}/")}
    return sorted({*kinds, *(name for place in places(folder) for name in stems(place / group))})


def stems(folder: Path) -> list[str]:
    """The names of the YAML files in a folder, if there is one. Raises ConfigError if it cannot be read."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".yaml")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ConfigError(f"{folder}: {reason}; allowed: a folder that can be read") from None
    return sorted(name.removesuffix(".yaml") for name in names if (folder / name).is_file())


# --- names ---------------------------------------------------------------------------------------------------------


def listed(options: Sequence[str], most: int = MOST_NAMES) -> str:
    """What is allowed, in a line that can be read: at most so many names."""
    if len(options) <= most:
        return ", ".join(options)
    return f"the {len(options)} names that stability-harness list shows"


def unknown_option(group: str, name: Any, options: Sequence[str], part: str = "") -> ConfigError:
    """For a choice that is none of `options`, or one with a `part` that is none."""
    hint = nearest(part or str(name), options)
    allowed = listed(options, MOST_BESIDE_A_HINT if hint and group in LISTED else MOST_NAMES)
    return ConfigError(f"{group}={name}: unknown {f'{group} {part}'.rstrip()}; {hint}allowed: {allowed}")


def parts_of(group: str, name: Any, options: Sequence[str]) -> tuple[str, ...]:
    """The names that a choice of a `JOINED` group joins by `+`, sorted; one alone is its own only part.

    Joined again by `+` they are the combination's canonical name. `options` are the names of the files. Raises
    ConfigError with everything that is wrong with the name: a part that is unknown, empty or given twice, or `none`.
    """
    chosen, files = f"{group}={shown(name)}", [option for option in options if "+" not in option]
    if name in options:
        if "+" in name:
            reason = "a file whose name is that of a combination; allowed: a file name without +"
            raise ConfigError(f"{chosen}: {reason}")
        return (name,)
    if not isinstance(name, str) or "+" not in name:
        raise unknown_option(group, shown(name), files)
    problems = Problems()
    parts, allowed = [part.strip() for part in name.split("+")], [option for option in files if option != NONE]
    for part in dict.fromkeys(parts):
        with problems.collect():
            if not part:
                raise ConfigError(f"{chosen}: an empty part; allowed: names joined by +, of {listed(allowed)}")
            if parts.count(part) > 1:
                raise ConfigError(f"{chosen}: {part} is given {parts.count(part)} times; allowed: each name once")
            if part == NONE:
                said = "is the recipe as it is" if group == "mitigation" else "stands alone"
                raise ConfigError(f"{chosen}: none {said}; allowed beside others: {listed(allowed)}")
            if part not in allowed:
                raise unknown_option(group, shown(name), allowed, part)
    problems.check()
    return tuple(sorted(parts))


# --- beside files --------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """Every key of a sweep with its default.

    The fields of all faults are among them, without a value: they may stand beside any choice of `fault`.
    """
    trial: dict[str, Any] = {}
    for name, cls in sections().items():
        outer, _, inner = name.partition(".")
        trial[outer] = trial.get(outer, {}) | ({inner: vars(cls())} if inner else vars(cls()))
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
    detectors = {f"detect/{name}": {"name": name} for name in (NONE, *DETECTORS)}
    plugins = {f"hydra/launcher/{name}": options for name, options in settings.LAUNCHERS.items()}
    return {"schema": schema(), **faults, **detectors, **plugins, "hydra/sweeper/grid": settings.GridOptions}
