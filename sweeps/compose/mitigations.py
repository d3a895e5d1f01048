"""Mitigations: named differences to the recipe, read from their files, alone or several joined by `+`.

A recipe's file is read as a mitigation's is: fields of the trial, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader

from harness.config import Problems, checked, shown
from sweeps.compose.folders import chain
from sweeps.compose.hydra_calls import config_loader, own_folder
from sweeps.compose.overrides import assignment, combination, trial_fields, unknown_key
from sweeps.compose.places import options, parts_of, unknown_option
from sweeps.compose.yaml_files import told_of


@dataclass(frozen=True)
class Mitigation:
    """The fields that a choice of `mitigation` sets, by key. Equal combinations have one name, whatever their order."""

    name: str
    fields: dict[str, Any]


@dataclass
class Mitigations:
    """Every mitigation that a sweep chooses, each read once."""

    loader: ConfigLoader
    _read: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    _chosen: dict[Any, Mitigation] = field(default_factory=dict)

    @cached_property
    def _options(self) -> list[str]:
        return options("mitigation", own_folder(self.loader))

    def choose(self, name: Any) -> Mitigation:
        """The union of the differences of all parts of `name`.

        Raises ConfigError with everything that is wrong with the name, the files, or the parts with each other.
        """
        if name not in self._chosen:
            parts = parts_of("mitigation", name, self._options)
            differences: dict[str, Mapping[str, Any]] = {}
            problems = Problems()
            for part in parts:
                with problems.collect():
                    differences[part] = self.difference("mitigation", part)
            problems.check()
            self._chosen[name] = Mitigation("+".join(parts), _union(name, differences))
        return self._chosen[name]

    def difference(self, group: str, name: str) -> Mapping[str, Any]:
        """The fields that one file of a `group`, mitigations or recipes, sets. Raises ConfigError."""
        if (group, name) not in self._read:
            files = chain(group, name, folder := own_folder(self.loader))
            if not files:
                raise unknown_option(group, name, options(group, folder))
            fields, problems = {}, Problems()
            with told_of(f"{group}={name}"):
                for key, value in flat(files[0].fields).items():
                    with problems.collect():
                        if key not in trial_fields():
                            raise unknown_key(key, value, trial_fields())
                        fields[key] = checked(key, *trial_fields()[key], value)
                problems.check()
            self._read[group, name] = fields
        return self._read[group, name]


def in_parts(overrides: Sequence[str], folder: Path | None) -> list[str]:
    """Overrides of a question to Hydra, each combination of mitigations as the list that Hydra composes.

    Raises ConfigError for a combination that cannot be had.
    """
    composed = list(overrides)
    for place, text in enumerate(overrides):
        if combination(text) is None:
            continue
        group, chosen = assignment(text)
        if group == "mitigation":
            parts = Mitigations(config_loader(folder)).choose(chosen).name.split("+")
            names = ",".join(f"'{part}'" for part in parts)
            composed[place] = f"mitigation=[{names}]"
        else:
            composed[place] = f"{group}.name='{'+'.join(parts_of(group, chosen, options(group, folder)))}'"
    return composed


def _union(name: str, differences: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All fields of several mitigations. Raises ConfigError for a field on which they disagree."""
    by_key: dict[str, dict[str, Any]] = {}
    for part, difference in differences.items():
        for key, value in difference.items():
            by_key.setdefault(key, {})[part] = value
    problems = Problems()
    for key, values in by_key.items():
        if any(value != next(iter(values.values())) for value in values.values()):
            given = ", ".join(f"{shown(value)} in {part}" for part, value in values.items())
            problems.reasons[f"mitigation={name}: {key} is {given}; allowed: parts that agree on it"] = None
    problems.check()
    return {key: next(iter(values.values())) for key, values in by_key.items()}


def flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping, by their keys joined with dots."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
