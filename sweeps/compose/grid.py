"""From overrides to trials: compose group choices once, set scalars directly, check every trial.

Stock Hydra composes and checks a job in 170 ms. Here a job costs a few dictionary look-ups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.types import RunMode
from omegaconf import OmegaConf

from harness.basics.printing import count
from harness.config import (
    IDENTITY,
    NO_FAULT,
    ConfigError,
    Fault,
    Problems,
    Trial,
    checked,
    field_types,
    sections,
    shown,
)
from harness.config.fields import getter_of
from harness.config.ladder import rungs
from harness.config.names import LAST_BIT
from harness.model.branches import BRANCHES
from harness.model.branches.block import Options as Block
from harness.objectives.table import OBJECTIVES
from harness.optim.optimizers import OPTIMIZERS
from harness.recovery.table import ACTIONS
from harness.training.activation_counts import idle_parts
from harness.training.config_checks import check_trial
from injectors import InjectableFault, facts_of, fault_types
from sweeps.compose.folders import BESIDE, chain
from sweeps.compose.hydra_calls import CONFIG_NAME, own_folder
from sweeps.compose.mitigations import Mitigation, Mitigations, flat
from sweeps.compose.overrides import GROUPS, RUN_KEYS, assignment, trial_fields, unknown_key
from sweeps.compose.places import NONE, PLAIN, fault_schemas, options, parts_of, schema, unknown_option
from sweeps.compose.run_length import FOLLOWING, Written, scaled
from sweeps.compose.yaml_files import told_of

CHOSEN: dict[str, tuple[Container[str], Sequence[str]]] = {
    "optimizer": (OPTIMIZERS, ["optim.name"]),
    "branch": (BRANCHES, [f"block.{place}" for place in field_types(Block)]),
    "objective": (OBJECTIVES, ["objective.name"]),
}
"""Parts that a trial chooses by name, each with a section of that name if it has options; and the keys that choose."""

CHOOSING = (
    "detect.name",
    "playbook.name",
    "playbook.ladder",
    "policy.reward",
    *(key for _, keys in CHOSEN.values() for key in keys),
)
"""The keys by whose values sections act or not."""

OWN = "own"  # the name of a playbook whose ladder is given by itself


def _why_idle(section: str, values: Mapping[str, Any]) -> str:
    """Why the fields of a section reach nothing: it is that of a part which is not chosen. Empty if they do."""
    outer, _, part = section.partition(".")
    if outer == "detect" and part and part not in values["detect.name"].split("+"):
        return f"detect={values['detect.name']} has no such field"
    if outer == "playbook" and part and not _acts(part, values["playbook.ladder"]):
        return f"playbook={values['playbook.name']} has no such field"
    if outer == "policy" and part and values["objective.name"] == "policy" and values["policy.reward"] != part:
        return f"policy.reward={values['policy.reward']} has no such field"
    section = outer if outer == "policy" else section
    for parts, keys in CHOSEN.values():
        if section in parts and section not in [values[key] for key in keys]:
            names = " and ".join(f"{key}={values[key]}" for key in keys)
            return f"{names} {'has' if len(keys) == 1 else 'have'} no such field"
    return ""


def _idle_parts(mitigation: Mitigation, values: Mapping[str, Any]) -> Sequence[str]:
    """Why a mitigation is none of this trial, if it sets a field of a part that is not chosen: a line, or none."""
    for key, value in mitigation.fields.items():
        if why := _why_idle(section := key.rpartition(".")[0], values):
            keys = next((keys for parts, keys in CHOSEN.values() if section in parts), [])
            allowed = "".join(f"{choosing}={section}, or " for choosing in keys) + "another mitigation"
            given = f"mitigation={mitigation.name}: {key}={shown(value)}"
            return [f"{given} reaches nothing, because {why}; allowed: {allowed}"]
    return []


def _acts(name: str, ladder: str) -> bool:
    """Whether an action stands on a ladder, or, of snapshots, one that goes back to them."""
    actions = [action for rung in rungs(ladder) for action in rung.actions]
    return name in actions or (name == "snapshot" and any(ACTIONS[a].goes_back for a in actions if a in ACTIONS))


@dataclass
class Composer:
    """Turns the override lists of a sweep into trials. One sweep has one study, so each recipe is composed once.

    A value for a key in `required` must reach a trial; other values may be overruled everywhere.
    """

    loader: ConfigLoader
    study: str
    required: frozenset[str] = frozenset()
    _recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    _mitigations: Mitigations = field(init=False)
    _presets: dict[str, dict[str, Any]] = field(default_factory=dict)
    _faults: dict[tuple[str, ...], Fault] = field(default_factory=dict)
    _parts: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _refused: dict[tuple[Any, ...], Sequence[str]] = field(default_factory=dict)
    _but_for_seed: dict[tuple[Any, ...], Trial] = field(
        default_factory=dict
    )  # a trial of these overrides, beside its seed
    _acting: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)
    _reached: set[str] = field(default_factory=set)
    _overruled: dict[str, str] = field(default_factory=dict)
    _idle: dict[str, bool] = field(default_factory=dict)
    _written: Written = field(init=False)
    _moved: dict[int, dict[str, None]] = field(default_factory=dict)  # train.steps -> values of the study, in words

    def __post_init__(self) -> None:
        self._mitigations = Mitigations(self.loader)
        self.recipe()
        self._written = Written.of(self.study, own_folder(self.loader))

    def recipe(self, name: str = PLAIN) -> dict[str, Any]:
        """A recipe and what the study changes in it, as flat keys; no mitigation, no fault. Raises ConfigError."""
        if name in self._recipes:
            return self._recipes[name]
        self._mitigations.difference("recipe", name)
        overrides = [f"study={self.study}", f"recipe={name}"]
        config = self.loader.load_configuration(CONFIG_NAME, overrides, run_mode=RunMode.MULTIRUN)
        recipe, problems = {}, Problems()
        for group, usual in (
            ("recipe", name),
            ("mitigation", NONE),
            ("fault", NONE),
            ("detect", NONE),
            ("playbook", NONE),
        ):
            if (chosen := config.hydra.runtime.choices.get(group)) != usual:
                problems.reasons[f"study={self.study}: {group}={chosen}: {BESIDE}"] = None
        for key, value in flat(OmegaConf.to_container(config)).items():  # type: ignore[arg-type]
            if key in RUN_KEYS or key.startswith("hydra.") or (key.startswith("fault.") and value in (None, "none")):
                continue
            with problems.collect(), told_of(f"study={self.study}"):
                if key in trial_fields():
                    recipe[key] = checked(key, *trial_fields()[key], value)
                elif key.split(".")[0] in GROUPS:
                    raise ConfigError(f"{key}={value}: {BESIDE}")
                else:
                    raise unknown_key(key, value, [*trial_fields(), *RUN_KEYS])
        problems.check()
        self._recipes[name] = recipe
        return recipe

    def preset(self, name: str) -> dict[str, Any]:
        """The fields that a choice of `fault` sets, `kind` among them. Raises ConfigError."""
        if name not in self._presets:
            presets = options("fault", own_folder(self.loader))
            if name not in presets:
                raise unknown_option("fault", name, presets)
            values = {"kind": "none"} if name == "none" else self._fault_composed(name)
            kinds: Mapping[str, type] = fault_types()
            kind = str(values.get("kind"))
            with told_of(f"fault={name}"):
                if kind not in kinds:
                    raise ConfigError(f"kind={kind}: unknown kind of fault; allowed: {', '.join(sorted(kinds))}")
                known = field_types(kinds[kind]) if kind != "none" else dict.fromkeys(IDENTITY, (str, False))
                for key, value in values.items():
                    if key not in known and value is not None:
                        raise unknown_key(key, value, known)
            preset = {key: value for key, value in values.items() if key in known}
            # A file that does not build on its kind (`defaults: [kind]`) leaves all that it does not say null.
            if any(value is None and key not in IDENTITY and not known[key][1] for key, value in preset.items()):
                preset = {key: value for key, value in preset.items() if value is not None}
            self._presets[name] = preset
        return self._presets[name]

    def _fault_composed(self, name: str) -> dict[str, Any]:
        """What the files of a fault say, as Hydra would compose them, and null for what other faults have.

        To have it compose the whole configuration takes 0.1 s a fault. Raises ConfigError.
        """
        files = chain("fault", name, own_folder(self.loader))
        base = files[-1].base if files else name
        if base is not None and base not in (schemas := fault_schemas()):
            raise unknown_option("fault", base, options("fault", own_folder(self.loader)))
        fields = schemas[base] if base is not None else {}
        for content in reversed(files):
            is_before = content.defaults[:1] == ["_self_"]  # what it builds on has the last word
            fields = {**content.fields, **fields} if is_before else {**fields, **content.fields}
        found: dict[str, Any] = schema()["fault"] | fields
        return found

    def trial(self, overrides: Sequence[str]) -> Trial:
        """The trial that a list of overrides describes. Raises ConfigError with everything that is wrong with it."""
        seeds = [text for text in overrides if text.startswith("seed=")]
        rest = tuple(text for text in overrides if text not in seeds)
        if len(seeds) != 1 or (other := self._but_for_seed.get(rest)) is None:
            trial = self._composed(overrides)
            if len(seeds) == 1 and assignment(seeds[0])[1] == trial.seed:
                self._but_for_seed[rest] = trial
            return trial
        self._note(*assignment(seeds[0]), "")
        return replace(other, seed=assignment(seeds[0])[1])

    def _composed(self, overrides: Sequence[str]) -> Trial:
        problems = Problems()
        given: dict[str, Any] = {}
        for text in overrides:
            with problems.collect():
                key, value = assignment(text)
                given[key] = value
        following = self._following(given)
        given |= {key: value for key, value in following.items() if key in given}
        chosen, fault_name = given.pop("mitigation", NONE), given.pop("fault", NONE)
        if "detect" in given:
            with problems.collect():
                parts = parts_of("detect", given.pop("detect"), options("detect"))
                given["detect.name"] = "+".join(parts)
        recipe, mitigation, playbook = given.pop("recipe", PLAIN), Mitigation(NONE, {}), given.pop("playbook", NONE)
        if playbook != NONE:
            with problems.collect():
                book = self._book(playbook, given)
                given = {key: value for key, value in book.items() if key not in given} | given
        if "playbook.ladder" in given and playbook == NONE:
            given["playbook.name"] = OWN
        with problems.collect():
            mitigation = self._mitigations.choose(chosen)
            moved = self._following(given, "mitigation", mitigation.fields)
            mitigation = replace(mitigation, fields=mitigation.fields | moved)
        fault = NO_FAULT
        with problems.collect():
            fault = self._fault(fault_name, given)
        values = self.recipe(recipe)
        values = values | {key: value for key, value in following.items() if key in values}
        values = values | {key: value for key, value in given.items() if key in values}
        mitigated = values | mitigation.fields
        for key, value in given.items():
            if key in mitigation.fields:
                if mitigation.fields[key] != value:
                    self._note(key, value, f"mitigation={mitigation.name} sets it")
            elif key in values:
                self._note(key, value, _why_idle(key.rpartition(".")[0], mitigated))
        problems.reasons |= dict.fromkeys(_idle_parts(mitigation, mitigated))
        problems.check()
        trial = self._made(mitigated, fault, recipe, mitigation.name)
        if reasons := self._reasons(trial):
            # What is wrong without the mitigation too is not its fault.
            others = self._reasons(self._made(values, fault, recipe, NONE))
            raise ConfigError(*(r if r in others else f"mitigation={mitigation.name}: {r}" for r in reasons))
        is_idle = mitigation.fields.items() <= values.items()
        self._idle[mitigation.name] = is_idle and self._idle.get(mitigation.name, True)
        return trial

    def _book(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that a choice of playbook sets, fitted to the run's length. Raises ConfigError."""
        book = {**self._mitigations.difference("playbook", name), "playbook.name": name}
        ladder = book.get("playbook.ladder", self.recipe()["playbook.ladder"])
        keys = (key for key in FOLLOWING if key.startswith("playbook.") and _acts(key.split(".")[1], ladder))
        return book | self._following(given, "playbook", {key: self.recipe()[key] for key in keys} | book)

    def _following(
        self, given: Mapping[str, Any], group: str = "", chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The study's own values that move because another train.steps is `given`; or those of what it has `chosen`.

        What the command line gives does not move.
        """
        steps, written = given.get("train.steps"), self.recipe()["train.steps"]
        keys = self._written.keys - self.required
        if steps in (None, written) or (group and group not in keys):
            return {}
        values = chosen if chosen is not None else {key: given.get(key, self.recipe().get(key)) for key in keys}
        moved = {}
        for key in sorted(FOLLOWING & values.keys() - self.required):
            if (new := scaled(values[key], written, steps)) != values[key]:
                moved[key] = new
                self._moved.setdefault(steps, {})[f"{key} {values[key]} -> {new}"] = None
        return moved

    def _made(self, values: Mapping[str, Any], fault: Fault, recipe: str, mitigation: str) -> Trial:
        parts: dict[str, Any] = {}
        for part, read in self._acting_in(values):
            fields = read(values)
            if (part, fields) not in self._parts:  # one object for all that are equal: many trials take less memory
                self._parts[part, fields] = sections()[part](*fields)
            parts[part] = self._parts[part, fields]
        return Trial.of(parts, fault=fault, recipe=recipe, mitigation=mitigation, seed=values["seed"])

    def _acting_in(self, values: Mapping[str, Any]) -> list[tuple[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]]:
        """The sections that act, each with what reads its fields from flat keys."""
        chosen = {key: values[key] for key in CHOOSING}
        known = tuple(chosen.values())
        if known not in self._acting:
            acting = {part: cls for part, cls in sections().items() if not _why_idle(part, chosen)}
            keys = {part: [f"{part}.{name}" for name in field_types(cls)] for part, cls in acting.items()}
            self._acting[known] = [(part, getter_of(names, itemgetter)) for part, names in keys.items()]
        return self._acting[known]

    def _reasons(self, trial: Trial) -> Sequence[str]:
        """Everything because of which a trial cannot be trained, which depends on neither its name nor its seed."""
        made_of = tuple(map(id, trial.parts.values()))  # objects that are kept, one for all that are equal
        if made_of not in self._refused:
            problems = Problems()
            with problems.collect():
                check_trial(trial)
            if isinstance(trial.fault, InjectableFault) and trial.model.width % trial.model.head_dim == 0:
                with problems.collect():
                    trial.fault.check(facts_of(trial))
            self._refused[made_of] = tuple(problems.reasons)
        return self._refused[made_of]

    def _fault(self, name: str, given: Mapping[str, Any]) -> Fault:
        """The fault of that name with the given `fault.*` fields that it has."""
        preset = self.preset(name)
        cls: type = fault_types()[preset["kind"]]
        known = field_types(cls) if cls is not Fault else {}
        fields = dict(preset)
        for key, value in given.items():
            section, _, field_name = key.partition(".")
            if section == "fault":
                self._note(key, value, "" if field_name in known else f"fault={name} has no such field")
                is_settled = field_name in getattr(cls, "settles", ()) and key not in self.required
                if field_name in known and not is_settled:
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
            self._faults[made] = fault.resolved().of_sweep() if isinstance(fault, InjectableFault) else fault
        return self._faults[made]

    def _note(self, key: str, value: Any, why_idle: str) -> None:
        """A value of the overrides reaches a trial, or does not, for a reason."""
        if not why_idle:
            self._reached.add(key)
        elif key in self.required:
            section = key.rpartition(".")[0]
            outer = section.partition(".")[0]
            usual = outer if outer in ("fault", "detect", "playbook") else "mitigation"
            usual = "policy.reward" if section.startswith("policy.") else usual
            other = next((kind for kind, (parts, _) in CHOSEN.items() if section in parts), usual)
            reason = f"reaches no trial, because {why_idle}"
            self._overruled[key] = f"{key}={value}: {reason}; allowed: leave it out, or another {other}"

    def trials(self, jobs: Sequence[Sequence[str]]) -> list[Trial]:
        """The trials of all jobs, equal ones once, in order; a campaign is one trial, see `campaigns`.

        Raises ConfigError, also for a value that no trial uses: a fault's field without such a fault, or a field that
        the mitigation sets in every trial.
        """
        trials: dict[str, Trial] = {}
        problems = Problems()
        for job in jobs:
            with problems.collect():
                trial = self.trial(job)
                trials.setdefault(trial.id, trial)
        problems.reasons |= {reason: None for key, reason in self._overruled.items() if key not in self._reached}
        problems.check()
        return list(trials.values())

    def notices(self, trials: Sequence[Trial], idle: str = "warn") -> list[str]:
        """Notes on what changed nothing, one line each.

        A line for each mitigation that changed nothing in any trial made so far, for each part idle in `trials`, and
        for each length of a run to which values of the study were fitted.

        Raises ConfigError with all of the first two where `idle` is "refuse".
        """
        names = sorted(name for name, is_idle in self._idle.items() if is_idle and name != NONE)
        lines = [f"mitigation={name}: sets nothing that the recipe does not have already" for name in names]
        numbers = Counter((trial.mitigation, reason) for trial in trials for reason in idle_parts(trial).values())
        for (name, reason), number in sorted(numbers.items()):
            where = "" if name == NONE else f"mitigation={name}: "
            lines.append(f"{where}{reason} ({count(number, 'trial')})")
        if lines and idle == "refuse":
            raise ConfigError(*(f"{line}; allowed: trials in which it acts, or idle=warn" for line in lines))
        written = f"study={self.study} is written for train.steps={self.recipe()['train.steps']}"
        moves = {steps: ", ".join(sorted(moved)) for steps, moved in sorted(self._moved.items()) if moved}
        return [*lines, *(f"{written}; for {steps} steps: {moved}" for steps, moved in moves.items())]

    def last_bit(self) -> Fault:
        """The fault from which the clean envelope is made."""
        return self._fault(LAST_BIT, {})
