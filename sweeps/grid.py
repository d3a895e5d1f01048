"""From overrides to trials: compose group choices once, set scalars directly, check every trial.

Stock Hydra composes and checks a job in 170 ms. Here a job costs a few dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.config import (
    IDENTITY,
    NO_FAULT,
    PARTS,
    ConfigError,
    Fault,
    Problems,
    Trial,
    check_trial,
    checked,
    field_types,
)
from injectors import InjectableFault, fault_types
from injectors.fault import Places, places_of
from sweeps import settings
from sweeps.arguments import CONFIG_NAME, GROUPS, RUN_KEYS, assignment, trial_fields, unknown_key, unknown_option


def schema() -> dict[str, Any]:
    """Every key of a sweep with its default: what Hydra knows as `schema`.

    The fields of all faults are among them, without a value: they may stand beside any choice of `fault`.
    """
    trial = {name: vars(cls()) for name, cls in PARTS.items()}
    fault = {name: None for cls in fault_types().values() for name in vars(cls())}
    return {**trial, "seed": Trial().seed, "fault": {**fault, "kind": "none", "name": "none"}, **settings.schema()}


def fault_schemas() -> dict[str, dict[str, Any]]:
    """Defaults of each kind of fault; `none` has no fields."""
    return {kind: {"kind": kind} if kind == "none" else vars(cls()) for kind, cls in fault_types().items()}


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@contextmanager
def _told_of(where: str) -> Iterator[None]:
    """Say of each reason where its key stands."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(f"{where}: {reason}" for reason in error.reasons)) from None


@dataclass
class Composer:
    """Turns the override lists of a sweep into trials. One sweep has one study, so its recipe is composed once.

    A value for a key in `required` must reach a trial; other values may be overruled everywhere.
    """

    loader: ConfigLoader
    study: str
    required: frozenset[str] = frozenset()
    recipe: dict[str, Any] = field(init=False)
    _mitigations: dict[str, dict[str, Any]] = field(default_factory=dict)
    _presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    _faults: dict[tuple[str, ...], Fault] = field(default_factory=dict)
    _parts: dict[tuple, Any] = field(default_factory=dict)
    _places: dict[tuple, Places] = field(default_factory=dict)
    _reached: set[str] = field(default_factory=set)
    _overruled: dict[str, str] = field(default_factory=dict)

    def _compose(self, *overrides: str) -> DictConfig:
        return self.loader.load_configuration(
            CONFIG_NAME, [f"study={self.study}", *overrides], run_mode=RunMode.MULTIRUN
        )

    def __post_init__(self) -> None:
        self.recipe = self._compose_recipe()

    def _compose_recipe(self) -> dict[str, Any]:
        """Defaults and what the study changes in them, as flat keys; no mitigation, no fault. Raises ConfigError."""
        config = self._compose()
        recipe, problems = {}, Problems()
        beside = "belongs under hydra.sweeper.params of a study; allowed: model, optim, schedule, train, data, seed"
        for group in ("mitigation", "fault"):
            if config.hydra.runtime.choices.get(group) != "none":
                reason = f"study={self.study}: {group}={config.hydra.runtime.choices.get(group)}: {beside}"
                problems.reasons[reason] = None
        for key, value in _flat(OmegaConf.to_container(config)).items():  # type: ignore[arg-type]
            if key in RUN_KEYS or key.startswith("hydra.") or (key.startswith("fault.") and value in (None, "none")):
                continue
            with problems.collect(), _told_of(f"study={self.study}"):
                if key in trial_fields():
                    recipe[key] = checked(key, *trial_fields()[key], value)
                elif key.split(".")[0] in GROUPS:
                    raise ConfigError(f"{key}={value}: {beside}")
                else:
                    raise unknown_key(key, value, [*trial_fields(), *RUN_KEYS])
        problems.check()
        return recipe

    def _check_option(self, group: str, name: Any) -> None:
        options = self.loader.get_group_options(group)
        if name not in options:
            raise unknown_option(group, name, options)

    def mitigation(self, name: str) -> dict[str, Any]:
        """The fields that a mitigation sets. Raises ConfigError."""
        if name not in self._mitigations:
            self._check_option("mitigation", name)
            file = self.loader.repository.load_config(f"mitigation/{name}")  # type: ignore[attr-defined]
            difference, problems = {}, Problems()
            values = OmegaConf.to_container(file.config)
            with _told_of(f"mitigation={name}"):
                if file.defaults_list:
                    raise ConfigError("defaults: a mitigation stands alone; allowed: fields of the trial")
                for key, value in _flat(values if isinstance(values, dict) else {"": values}).items():
                    with problems.collect():
                        if key not in trial_fields():
                            raise unknown_key(key, value, trial_fields())
                        difference[key] = checked(key, *trial_fields()[key], value)
                problems.check()
            self._mitigations[name] = difference
        return self._mitigations[name]

    def preset(self, name: str) -> dict[str, Any]:
        """The fields that a choice of `fault` sets, `kind` among them. Raises ConfigError."""
        if name not in self._presets:
            self._check_option("fault", name)
            composed = {"kind": "none"} if name == "none" else self._compose(f"fault={name}").fault
            values = _flat(OmegaConf.to_container(OmegaConf.create(composed)))  # type: ignore[arg-type]
            kinds: Mapping[str, type] = fault_types()
            kind = str(values.get("kind"))
            with _told_of(f"fault={name}"):
                if kind not in kinds:
                    raise ConfigError(f"kind={kind}: unknown kind of fault; allowed: {', '.join(sorted(kinds))}")
                own = field_types(kinds[kind]) if kind != "none" else dict.fromkeys(IDENTITY, (str, False))
                for key, value in values.items():
                    if key not in own and value is not None:
                        raise unknown_key(key, value, own)
            found = {key: value for key, value in values.items() if key in own}
            # A file that does not build on its kind (`defaults: [kind]`) leaves all that it does not say null.
            if any(value is None and key not in IDENTITY and not own[key][1] for key, value in found.items()):
                found = {key: value for key, value in found.items() if value is not None}
            self._presets[name] = found
        return self._presets[name]

    def trial(self, overrides: Sequence[str]) -> Trial:
        """The trial that a list of overrides describes. Raises ConfigError with everything that is wrong with it."""
        problems = Problems()
        given: dict[str, Any] = {}
        for text in overrides:
            with problems.collect():
                key, value = assignment(text)
                given[key] = value
        mitigation, fault_name = given.pop("mitigation", "none"), given.pop("fault", "none")
        difference: dict[str, Any] = {}
        with problems.collect():
            difference = self.mitigation(mitigation)
        fault = NO_FAULT
        with problems.collect():
            fault = self._fault(fault_name, given)
        values = dict(self.recipe)
        for key, value in given.items():
            if key in values:
                values[key] = value
                self._note(key, value, key not in difference, f"mitigation={mitigation} sets it")
        problems.check()
        values |= difference
        parts = {part: self._part(part, cls, values) for part, cls in PARTS.items()}
        trial = Trial(**parts, fault=fault, mitigation=mitigation, seed=values["seed"])
        with problems.collect():
            check_trial(trial)
        if isinstance(fault, InjectableFault) and trial.model.width % trial.model.head_dim == 0:
            with problems.collect():
                self._check_fault(fault, trial)
        problems.check()
        return trial

    def _fault(self, name: str, given: Mapping[str, Any]) -> Fault:
        """The fault of that name with the given `fault.*` fields that it has."""
        preset = self.preset(name)
        cls: type = fault_types()[preset["kind"]]
        own = field_types(cls) if cls is not Fault else {}
        fields = dict(preset)
        for key, value in given.items():
            section, _, field_name = key.partition(".")
            if section == "fault":
                self._note(key, value, field_name in own, f"fault={name} has no such field")
                if field_name in own:
                    fields[field_name] = value
        made = (name, *map(repr, fields.values()))
        if made not in self._faults:
            problems, checked_fields = Problems(), {}
            for field_name, value in fields.items():
                if field_name not in IDENTITY:
                    with problems.collect():
                        checked_fields[field_name] = checked(f"fault.{field_name}", cls, field_name, value)
            problems.check()
            fault = cls(kind=preset["kind"], name=name, **checked_fields)
            self._faults[made] = fault.resolved() if isinstance(fault, InjectableFault) else fault
        return self._faults[made]

    def _part(self, part: str, cls: type, values: Mapping[str, Any]) -> Any:
        """One dataclass of the trial; equal ones are the same object, so that many trials cost little memory."""
        fields = tuple(values[f"{part}.{name}"] for name in field_types(cls))
        if (part, fields) not in self._parts:
            self._parts[part, fields] = cls(*fields)
        return self._parts[part, fields]

    def _check_fault(self, fault: InjectableFault, trial: Trial) -> None:
        if trial.structure not in self._places:
            self._places[trial.structure] = places_of(trial, trial.data.vocabulary)
        fault.check(trial, self._places[trial.structure])

    def _note(self, key: str, value: Any, used: bool, why: str) -> None:
        if used:
            self._reached.add(key)
        elif key in self.required:
            other = "fault" if key.startswith("fault.") else "mitigation"
            self._overruled[key] = (
                f"{key}={value}: reaches no trial, because {why}; allowed: leave it out, or another {other}"
            )

    def trials(self, jobs: Sequence[Sequence[str]]) -> list[Trial]:
        """The trials of all jobs, equal ones once, in order; a campaign is one trial, see `campaigns`.

        Raises ConfigError, also for a value that no trial uses: a fault's field without such a fault, or a field that
        the mitigation sets in every trial.
        """
        found: dict[str, Trial] = {}
        problems = Problems()
        for job in jobs:
            with problems.collect():
                trial = self.trial(job)
                found.setdefault(trial.id, trial)
        problems.reasons |= {reason: None for key, reason in self._overruled.items() if key not in self._reached}
        problems.check()
        return list(found.values())

    def last_bit(self) -> Fault:
        """The fault from which the clean envelope is made."""
        return self._fault("last_bit", {})
