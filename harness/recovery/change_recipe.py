"""Another recipe from here on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.config import PER_TRIAL, ConfigError, Problems, Trial, checked, field_types, sections
from harness.config.fields import from_yaml, scope_of, shown, text
from harness.recovery.base import Action, Detail, Row

WANTED = "a mapping of keys to values, such as {optim.clip: 0.3, optim.beta2: 0.9}"


def canonical(value: Any, key: str) -> str:
    """Changes as a configuration has them, from a mapping or its text. Raises ConfigError."""
    import yaml  # here and below, because packs are trained without it

    given = from_yaml(value)
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{key}={shown(value)}: not a recipe's changes; allowed: {WANTED}")
    return yaml.safe_dump(dict(sorted(given.items())), default_flow_style=True, width=10_000).strip()


@dataclass(frozen=True)
class Options:
    """`playbook.change_recipe.*`."""

    set: str = text(PER_TRIAL, "{}", "fields that are others from there on, by key", convert=canonical)


class ChangeRecipe(Action):
    """Fields of the recipe have other values from there on: weight decay, clipping, beta2, an activation's clamp, ...

    Only what may differ between the trials of a pack, and not what is absent (null) in the run.
    """

    takes = True
    changes_course = True
    source = "OPT logbook, Zhang et al. 2022, arXiv 2205.01068, section 2.5: clipping from 1.0 to 0.3 at a restart"

    @classmethod
    def refused(cls, trial: Trial) -> Iterator[str]:
        try:
            changed = amended(trial, changes_of(trial.section("playbook.change_recipe")))
        except ConfigError as error:
            yield from error.reasons
            return
        if changed == trial:
            yield f"playbook.change_recipe.set={{}}: changes nothing; allowed: {WANTED}"

    def do(self, row: Row, options: Any) -> Detail:
        changes = changes_of(options)
        row.amend(changes)
        return {"set": changes}


def changes_of(options: Options) -> dict[str, Any]:
    """What is changed, by key."""
    changes: dict[str, Any] = from_yaml(options.set)
    return changes


def amended(trial: Trial, changes: Mapping[str, Any]) -> Trial:
    """The trial with these fields, by key. Raises ConfigError for what cannot change while a pack trains."""
    values = {name: dict(vars(trial.section(name))) for name in sections()}
    problems, where = Problems(), "playbook.change_recipe.set"
    known = {f"{part}.{field}" for part, cls in sections().items() for field in field_types(cls)}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        with problems.collect():
            if key not in known or scope_of(sections()[section], name) == "structural":
                why = "unknown key" if key not in known else "fixes the shape of a pack"
                raise ConfigError(f"{where}: {key}={shown(value)}: {why}; allowed: per-trial fields of the recipe")
            if section.split(".")[0] in ("playbook", "detect", "train", "data", "schedule") or key == "optim.lr":
                raise ConfigError(
                    f"{where}: {key}={shown(value)}: is read before the run; allowed: others of the recipe"
                )
            new = checked(key, sections()[section], name, value)
            if (new is None) != (values[section][name] is None):
                has = shown(values[section][name])
                raise ConfigError(
                    f"{where}: {key}={shown(value)}: it is {has} in the run; allowed: both null, or neither"
                )
            values[section][name] = new
    problems.check()
    parts = {name: cls(**values[name]) for name, cls in sections().items()}
    return Trial.of(parts, fault=trial.fault, recipe=trial.recipe, mitigation=trial.mitigation, seed=trial.seed)
