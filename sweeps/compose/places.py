"""Where files of studies, recipes, mitigations and faults are: our folder, installed packages', and a user's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from harness.basics import plugins
from harness.config import ConfigError, Problems
from injectors import fault_types
from sweeps.compose.hydra_calls import FOLDER
from sweeps.compose.schemas import fault_schemas
from sweeps.compose.yaml_files import has_control, short

GROUPS = ("study", "recipe", "mitigation", "fault")
TAKEN = ("config.yaml", "schema.yaml", "hydra", "hydra_plugins", "search")  # what a user's folder has none of
WANTED = "a folder with studies in study/, recipes in recipe/, mitigations in mitigation/ or faults in fault/"


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


def options(group: str, folder: Path | None = None) -> list[str]:
    """The names that a choice of a group has, as Hydra would list them. Raises ConfigError."""
    kinds = fault_schemas() if group == "fault" else {}
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
