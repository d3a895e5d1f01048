"""What a user asks for, by names, mappings and YAML files, as faults and as the settings of detectors and playbooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.basics import plugins
from harness.basics.errors import nearest
from harness.config import NO_FAULT, ConfigError, Problems, Trial, checked, field_types, sections, shown
from harness.config.formats import LAYOUTS
from harness.config.limits import MOST_STEPS
from harness.detectors.loop_signals import RATE, stored
from harness.detectors.table import DETECTORS
from harness.faults.fault import InjectableFault, fault_types, matching
from harness.guards.playbook import actions_of, refused
from harness.readings.at_rest import AtRest
from harness.recovery.table import ACTIONS

DEFAULT_DETECTORS = "combined+finite"
MEASURED = ("loss", "grad_norm", "param_norm", "update_rms", "second_moment_norm", "learning_rate", "loss_scale")
"""The signals of a run of the user's own loop, as a store names them."""
OURS_ALONE = (
    *("anticipate", "change_recipe", "match_sampler", "raise_penalty", "reset_reference"),
    *("shrink_embedding", "swap_data"),
)
"""Actions on a recipe, a model and a text of ours."""
OF_VALUES = "value"  # the kind of a file that names none
MOST_BYTES = 2**20  # of a YAML file
Given = str | Path | Mapping[str, Any] | InjectableFault
WANTED = "a name, a mapping with `name`, a YAML file, a fault, or a list of those"


@dataclass(frozen=True)
class ChosenFault:
    """A fault, and whether its place or its start are a preset's own, which another run need not have."""

    fault: InjectableFault
    has_preset_place: bool = False
    has_preset_start: bool = False

    def started(self, steps: int) -> ChosenFault:
        """For a run of so many steps: one that is too short for the preset's start is struck in its middle."""
        if not self.has_preset_start or self.fault.start < steps:
            return self
        start: Any = {"start": max(steps // 2, min(1, steps - 1))}
        return dataclasses.replace(self, fault=dataclasses.replace(self.fault, **start))

    def fitted(self, shapes: Mapping[str, tuple[int, ...]], what: str) -> InjectableFault:
        """With a place among these; all of them where a preset's glob fits our GPT alone. Raises ConfigError."""
        tensor = getattr(self.fault, "tensor", None)
        if tensor is None:
            return self.fault
        try:
            matching("fault.tensor", tensor, shapes, getattr(self.fault, "layer", None), what)
        except ConfigError:
            if not self.has_preset_place:
                raise
            anywhere: Any = {
                name: value for name, value in (("tensor", "*"), ("layer", None)) if hasattr(self.fault, name)
            }
            return dataclasses.replace(self.fault, **anywhere)
        return self.fault


def chosen_faults(given: Given | Sequence[Given] | None) -> list[ChosenFault]:
    """The faults that are asked for; none for None and `none`. Raises ConfigError with all that is wrong."""
    if given is None:
        return []
    each = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    problems, found = Problems(), []
    for one in each:
        with problems.collect():
            chosen = _fault(one)
            found += [] if chosen is None else [_reached(chosen)]
    problems.check()
    return found


def _reached(chosen: ChosenFault) -> ChosenFault:
    """The fault, if what it strikes can be seen in any model. Raises ConfigError."""
    if "routes" in chosen.fault.asks():
        why = "where a model of one's own sends its tokens is not seen"
        allowed = "faults of values, such as large_expert at tensors of its experts, or activation_bit at its router"
        raise ConfigError(f"fault={chosen.fault.name}: {why}; allowed: {allowed}")
    return chosen


def _fault(given: Any) -> ChosenFault | None:
    if isinstance(given, InjectableFault):
        return ChosenFault(given.resolved())
    if isinstance(given, Mapping):
        fields = dict(given)
        name = fields.pop("name", None)
    elif isinstance(given, str | Path):
        name, fields = given, {}
    else:
        raise ConfigError(f"fault={shown(given)}: wrong type ({type(given).__name__}); allowed: {WANTED}")
    if name == NO_FAULT.name:
        return None
    if not isinstance(name, str | Path):
        raise ConfigError(f"fault.name={shown(name)}: names no fault; allowed: {WANTED}")
    preset = _preset(str(name))
    kind = fields.pop("kind", preset.pop("kind"))
    cls: Any = fault_types().get(kind)
    if cls is None:
        raise ConfigError(f"fault.kind={shown(kind)}: no kind of fault; {_meant(str(kind), sorted(fault_types()))}")
    if not {"bit", "format"} & set(fields) and plugins.conf_file("fault", str(name)) is not None:
        preset = _from_the_top(preset)
    values = _checked("fault", cls, {**preset, **fields})
    place = {"tensor", "layer"} & set(fields)
    fault = cls(**{**values, "name": Path(name).stem, "kind": kind}).resolved()
    return ChosenFault(fault, not place, not {"start", "until"} & set(fields))


def _no_such(key: str, name: str, why: str, known: Sequence[str]) -> ConfigError:
    """The error for a name that is none of `known`."""
    return ConfigError(f"{key}={shown(name)}: {why}; {_meant(name, known)}, or a file that ends in .yaml")


def _meant(name: str, known: Iterable[str]) -> str:
    """The nearest of the `known` names, and all of them."""
    return f"{nearest(name, known)}allowed: {', '.join(known)}"


def _from_the_top(preset: dict[str, Any]) -> dict[str, Any]:
    """A preset whose bit is of fp32, as those of our GPT are, with the same bit of the exponent in any format."""
    layout, bit = LAYOUTS["fp32"], preset.get("bit")
    if "format" in preset or not isinstance(bit, int) or bit < layout.mantissa:
        return preset
    return {**preset, "bit": bit - layout.bits}


def _preset(name: str) -> dict[str, Any]:
    """The fields of a preset, a YAML file or a kind with its defaults."""
    if name.endswith((".yaml", ".yml")):
        tree = read_yaml("fault", Path(name).expanduser())
    elif (file := plugins.conf_file("fault", name)) is not None:
        tree = read_yaml("fault", file)
    elif name in fault_types():
        return {"kind": name}
    else:
        known = sorted({*plugins.conf_names("fault"), *fault_types()})
        raise _no_such("fault", name, "unknown", known)
    fields = {key: value for key, value in tree.items() if key not in ("about", "defaults")}
    kinds = [base for base in tree.get("defaults") or [] if isinstance(base, str) and base != "_self_"]
    fields.setdefault("kind", kinds[0] if kinds else OF_VALUES)
    fields.pop("name", None)
    return fields


def read_yaml(key: str, file: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping. Raises ConfigError."""
    allowed = "a YAML file with a mapping"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{key}={file}: has more than {MOST_BYTES} bytes; allowed: {allowed}")
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"{key}={file}: cannot be read ({error.strerror}); allowed: {allowed}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{key}={file}: is not YAML ({why:.100}); allowed: {allowed}") from None
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"{key}={file}: holds no mapping; allowed: {allowed}")
    return tree


def _checked(key: str, cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a dataclass, each as it wants them. Raises ConfigError with all that is wrong."""
    known, problems, found = field_types(cls), Problems(), {}
    for name, value in values.items():
        with problems.collect():
            if name not in known:
                raise ConfigError(f"{key}.{name}={shown(value)}: unknown key; {_meant(name, known)}")
            found[name] = checked(f"{key}.{name}", cls, name, value)
    problems.check()
    return found


# --- detectors and playbooks -------------------------------------------------------------------------------------


def settings(detect: str | Mapping[str, Any] | None, recover: str | Path | Mapping[str, Any] | None) -> Trial:
    """`settings_of`, whose errors name the arguments of `attach`."""
    try:
        return settings_of(detect, recover)
    except ConfigError as error:
        raise ConfigError(*(in_a_loop(reason) for reason in error.reasons)) from None


def in_a_loop(reason: str) -> str:
    """A reason in the words of `attach`, where `recover` is what a trial has as `playbook`."""
    return reason.replace("playbook.", "recover.")


def settings_of(detect: str | Mapping[str, Any] | None, recover: str | Path | Mapping[str, Any] | None) -> Trial:
    """A trial whose sections `detect` and `playbook` are those asked for, which alone count. Raises ConfigError.

    `default` are the detectors that the playbook's own file names, and `combined+finite` where it names none.
    """
    book = _book(recover)
    its = book.pop("detect", None)
    watching = its if its is not None and detect in (None, "default") else detect
    parts = {name: cls() for name, cls in sections().items()}
    problems = Problems()
    with problems.collect():
        parts |= _sections("detect", _watching(watching))
    with problems.collect():
        parts |= _sections("playbook", book)
    problems.check()
    trial = Trial.of(parts)
    unseen = [name for name in _names(trial) if not can_see(name)]
    if unseen:
        allowed = ", ".join(name for name in DETECTORS if can_see(name))
        why = "watches signals of our GPT, which a model of one's own does not show"
        problems.reasons[f"detect={'+'.join(unseen)}: {why}; allowed: {allowed}"] = None
    for name in dict.fromkeys(actions_of(trial)):
        if name in OURS_ALONE:
            allowed = ", ".join(action for action in ACTIONS if action not in OURS_ALONE)
            why = "acts on the recipe or the data of our GPT"
            problems.reasons[f"playbook.ladder: action {name}: {why}; allowed: {allowed}"] = None
    problems.reasons |= dict.fromkeys(refused(with_steps(trial, MOST_STEPS)))  # how many there are is known later
    problems.check()
    return trial


def _watching(given: Any) -> Mapping[str, Any]:
    """`detect.*` as a mapping, each name known. Raises ConfigError."""
    if isinstance(given, Mapping):
        tree = {"name": "default", **given}
    elif given is None or isinstance(given, str):
        tree = {"name": given or "none"}
    else:
        wanted = "names of detectors joined by +, default, or a mapping with `name`"
        raise ConfigError(f"detect={shown(given)}: wrong type ({type(given).__name__}); allowed: {wanted}")
    if tree["name"] == "default":
        tree["name"] = DEFAULT_DETECTORS
    names = str(tree["name"]).split("+")
    if unknown := [name for name in names if name not in (*DETECTORS, "none")]:
        seen = list(filter(can_see, DETECTORS))
        allowed = f"{nearest(unknown[0], seen)}allowed: default, none, {', '.join(seen)}, joined by +"
        raise ConfigError(f"detect={'+'.join(unknown)}: no detector; {allowed}")
    return {**tree, "name": "+".join(sorted(set(names)))}


def with_steps(trial: Trial, steps: int) -> Trial:
    """The same settings for a run of so many steps."""
    return dataclasses.replace(trial, train=dataclasses.replace(trial.train, steps=steps))


def can_see(name: str) -> bool:
    """Whether a run of the user's own loop shows what a detector watches; `combined` does without what is of layers."""
    return name == "combined" or set(stored(DETECTORS[name].watches)) <= {RATE, *MEASURED, *AtRest.signals}


def looks_at_rest(trial: Trial) -> bool:
    """Whether a detector watches for weights and moments that change before their update."""
    return any(set(DETECTORS[name].watches) & AtRest.signals.keys() for name in _names(trial))


def _names(trial: Trial) -> list[str]:
    name = trial.section("detect").name
    return [] if name == "none" else name.split("+")


def _book(recover: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """`playbook.*` as nested mappings, and `detect`, if the file has that."""
    if recover is None or recover == "none":
        return {}
    if isinstance(recover, Mapping):
        return {"name": "own", **recover}
    if not isinstance(recover, str | Path):
        wanted = "the name of a playbook, a YAML file, or a mapping with `ladder`"
        raise ConfigError(f"recover={shown(recover)}: wrong type ({type(recover).__name__}); allowed: {wanted}")
    name = str(recover)
    file = Path(name).expanduser() if name.endswith((".yaml", ".yml")) else plugins.conf_file("playbook", name)
    if file is None:
        raise _no_such("recover", name, "no playbook", plugins.conf_names("playbook"))
    tree = read_yaml("recover", file)
    book = tree.get("playbook", {})
    if not isinstance(book, dict):
        raise ConfigError(f"recover={name}: its `playbook` is no mapping; allowed: one with `ladder`")
    return {"name": Path(name).stem, **book} | ({"detect": tree["detect"]} if "detect" in tree else {})


def _sections(key: str, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a key, and those below it, from nested mappings."""
    own, found, problems = {}, {}, Problems()
    for name, value in tree.items():
        inner = f"{key}.{name}"
        with problems.collect():
            if inner in sections() and isinstance(value, Mapping):
                found[inner] = sections()[inner](**_checked(inner, sections()[inner], value))
            else:
                own[name] = value
    with problems.collect():
        found[key] = sections()[key](**_checked(key, sections()[key], own))
    problems.check()
    return found
