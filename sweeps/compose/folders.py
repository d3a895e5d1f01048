"""What a file of a study, a mitigation or a fault may say. Every such file is read here, on every way to Hydra.

Hydra imports, calls, opens and truncates what its own configuration names, so none of that comes from a file: of
`hydra.*` a study has the sweeper's params, and plain options of a launcher, which are handed on as if they stood on the
command line. What is left for Hydra to compose is a tree of plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.config import ConfigError, Problems, sections
from sweeps.compose.about import About, about_of
from sweeps.compose.places import place_of
from sweeps.compose.settings import LAUNCHERS, PARTS
from sweeps.compose.yaml_files import LARGEST, has_control, short, text_of, told_of, tree_of

PACKAGES: dict[str, str | None] = {
    "study": "_global_",
    "recipe": "_global_",
    "mitigation": "_global_",
    "playbook": "_global_",
}
PACKAGES |= {"fault": None}  # the group's own
RUN_CODE = ("setup", "extra")  # shell lines of a job, and any option of sbatch, some of which are commands
OPTIONS = {
    launcher: tuple(name for name in vars(cls()) if name not in (*RUN_CODE, "_target_"))
    for launcher, cls in LAUNCHERS.items()
}
SEVERAL = ("grids", "conditions", "sizes")  # of hydra.sweeper: each has axes by name
OF_HYDRA = (
    "may not come from a file; allowed of hydra.* in a study: sweeper.params, sweeper.grids, sweeper.conditions, "
    f"sweeper.sizes, and of launcher: {', '.join(name for names in OPTIONS.values() for name in names)}"
)
BESIDE = "belongs under hydra.sweeper.params of a study; allowed: model, optim, schedule, train, data, seed"
MOST_BASES = 10
_NAME = re.compile(r"[^/@:${}\[\]\s][^/@:${}\[\]]*")
_WORD = re.compile(r"[\w.,:+@%=&|*()\[\]-]+", re.ASCII)  # of an option, which becomes a line of a job's script


@dataclass(frozen=True)
class Content:
    """What a file says: `fields` and `defaults` are for Hydra, the rest is for us."""

    fields: Mapping[str, Any]
    about: About = About()
    defaults: Sequence[Any] = ()
    base: str | None = None  # the file of the same group that it builds on
    launcher: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of any launcher

    @property
    def composed(self) -> dict[str, Any]:
        """As Hydra takes it."""
        return {"defaults": list(self.defaults), **self.fields} if self.defaults else dict(self.fields)


def read(folder: Path, group: str, name: str) -> Content:
    """The file of an option of one of `GROUPS`. Raises ConfigError with all that it may not say."""
    file, where, problems = folder / group / f"{name}.yaml", f"{group}={name}", Problems()
    text = text_of(file)
    _check_package(where, group, text)
    tree = tree_of(file, text)
    defaults, hydra = tree.pop("defaults", None), tree.pop("hydra", None)
    for path, value in leaves(tree, where):
        with problems.collect():
            _check_leaf(where, path, value)
    about = tree.pop("about", {})
    for part, cls in PARTS.items():
        if not isinstance(tree.get(part, {}), dict):
            keys = ", ".join(f"{part}.{key}" for key in vars(cls()))
            problems.reasons[f"{where}: {part}={short(tree[part])}: a section, and no key; allowed: {keys}"] = None
    content = Content(tree)
    with problems.collect(), told_of(where):
        content = Content(tree, about_of(group, about))
    with problems.collect():
        content = _with_defaults(content, where, group, [] if defaults is None else defaults)
    with problems.collect():
        content = _with_hydra(content, where, group, {} if hydra is None else hydra)
    problems.check()
    return content


def leaves(tree: Any, where: str, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a tree, those within lists too, each with the keys that lead to it.

    Raises ConfigError for a key that is no word.
    """
    if not isinstance(tree, dict | list) or not tree:
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if not isinstance(key, str) and isinstance(tree, dict):
            reason = f"the key is a {type(key).__name__}; allowed: words (in quotes, where YAML takes them for others)"
            raise ConfigError(f"{where}: {'.'.join((*path, str(key)))}: {reason}")
        yield from leaves(value, where, (*path, str(key)))


def _check_package(where: str, group: str, text: str) -> None:
    """Raises ConfigError for a header that would put what a file says at another place than that of its group."""
    allowed = "no such line" if PACKAGES[group] is None else f"# @package {PACKAGES[group]}"
    for key, value in header_of(text):
        if key != "package" or value != PACKAGES[group]:
            given = f"@{key} {value}".strip()
            raise ConfigError(f"{where}: {given}: a {group} has its own place; allowed: {allowed}")


def header_of(text: str) -> Iterator[tuple[str, str]]:
    """The lines `# @KEY VALUE` at the head of a file, by which it says its package to Hydra."""
    for line in filter(None, map(str.strip, text.splitlines())):
        if not (match := re.match(r"#\s*@(\S*)\s*(.*)", line)):
            return
        yield match[1], match[2]


def _check_leaf(where: str, path: tuple[str, ...], value: Any) -> None:
    """Raises ConfigError for a value that is none by itself, or whose key is one of Hydra's."""
    key = ".".join(path)
    given = f"{where}: {key}={short(value)}"
    if "_target_" in key.split("."):
        raise ConfigError(f"{given}: would be imported and called; allowed: no _target_")
    if key.split(".")[0] == "hydra":
        raise ConfigError(f"{where}: {path[0]}: {OF_HYDRA}")
    if isinstance(value, str):
        if "${" in value:
            raise ConfigError(f"{given}: an interpolation; allowed: a value")
        if has_control(value.strip()):
            raise ConfigError(f"{given}: control characters; allowed: printable text")
        if value in ("", "???"):
            raise ConfigError(f"{given}: no value; allowed: a value, or null")
    elif type(value) is int and abs(value) > LARGEST:
        raise ConfigError(f"{given}: beyond 64 bits; allowed: {-LARGEST} to {LARGEST}")
    elif value == {} and path and path not in {(name,) for name in (*sections(), *PARTS)}:
        raise ConfigError(f"{given}: no value; allowed: a value, or null")
    elif value != {} and not isinstance(value, bool | int | float | None):
        raise ConfigError(f"{given}: wrong type ({type(value).__name__}); allowed: one number or word")


def _with_defaults(content: Content, where: str, group: str, defaults: Any) -> Content:
    """The content, with what its defaults list says. Raises ConfigError."""
    if group in ("recipe", "mitigation", "playbook") and defaults:
        raise ConfigError(f"{where}: defaults: a {group} stands alone; allowed: fields of the trial")
    if not isinstance(defaults, list):
        raise ConfigError(f"{where}: defaults: a {type(defaults).__name__}; allowed: a list")
    kept: list[Any] = []
    base = launcher = None
    for entry in defaults:
        if entry == "_self_":
            kept.append(entry)
        elif isinstance(entry, str) and _NAME.fullmatch(entry) and base is None:
            base = entry
            kept.append(entry)
        elif group == "study" and isinstance(entry, dict) and len(entry) == 1:
            ((key, name),) = entry.items()
            launcher = _launcher(where, str(key), name)
        else:
            allowed = f"_self_, and the name of one other {group}"
            raise ConfigError(f"{where}: defaults: {short(entry)}: may not come from a file; allowed: {allowed}")
    return replace(content, defaults=kept, base=base, launcher=launcher)


def _launcher(where: str, key: str, name: Any) -> str:
    """The launcher that an entry of a study's defaults chooses. Raises ConfigError for any other entry."""
    group = key.removeprefix("override").strip().removeprefix("/")
    given = f"{where}: {group}={short(name)}"
    if group in ("recipe", "mitigation", "fault", "playbook"):
        raise ConfigError(f"{given}: {BESIDE}")
    if key != "override /hydra/launcher":
        allowed = "override /hydra/launcher: NAME, _self_, and the name of one other study"
        raise ConfigError(f"{where}: defaults: {key}: {short(name)}: may not come from a file; allowed: {allowed}")
    if name not in [*LAUNCHERS]:  # it may be a list
        raise ConfigError(f"{given}: unknown hydra/launcher; allowed: {', '.join(LAUNCHERS)}")
    return str(name)


def _with_hydra(content: Content, where: str, group: str, hydra: Any) -> Content:
    """The content, with the axes and the launcher's options of a study. Raises ConfigError for the rest of `hydra`."""
    problems = Problems()
    params: dict[str, Any] = {}
    several: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in SEVERAL}
    options: dict[str, Any] = {}
    is_study = group == "study"
    for path, value in leaves(hydra, where, ("hydra",)):
        with problems.collect():
            match path[1:]:
                case ("sweeper", "params", name) if is_study:
                    _check_leaf(f"{where}: hydra.sweeper.params", (name,), value)
                    params[name] = value
                case ("sweeper", kind, one, name) if is_study and kind in SEVERAL:
                    _check_leaf(f"{where}: hydra.sweeper.{kind}", (one, name), value)
                    several[kind].setdefault(one, {})[name] = value
                case ("launcher", name, *_) if is_study:
                    options[name] = _option(where, name, hydra["launcher"][name])
                case () | ("sweeper",) | ("launcher",) if value in (None, {}):
                    pass
                case ("sweeper", kind) if kind in ("params", *SEVERAL) and value in (None, {}):
                    pass
                case ("sweeper", kind, one) if is_study and kind in SEVERAL and value in (None, {}):
                    _check_leaf(f"{where}: hydra.sweeper.{kind}", (one,), None)
                    several[kind].setdefault(one, {})  # the axes of all grids, and no others
                case ("sweeper", kind, *_, _, _) if is_study and (kind == "params" or kind in SEVERAL):
                    reason = "several values in brackets; allowed: one word, with commas between the values"
                    raise ConfigError(f"{where}: {'.'.join(path[: 4 + (path[2] in SEVERAL)])}: {reason}")
                case _:
                    given = f"{path[0]}={short(value)}" if len(path) == 1 else ".".join(path[:2])
                    raise ConfigError(f"{where}: {given}: {OF_HYDRA}")
    problems.check()
    axes = {name: found for name, found in (("params", params), *several.items()) if found}
    fields = {**content.fields, "hydra": {"sweeper": axes}} if axes else content.fields
    return replace(content, fields=fields, options=options)


# --- what a study says to its launcher ---------------------------------------------------------------------------


def _option(where: str, name: str, value: Any) -> Any:
    """A launcher's option, as a study may give it. Raises ConfigError."""
    given = f"{where}: hydra.launcher.{name}={short(value)}"
    if name in RUN_CODE:
        reason = "may run any command in a job, so it does not come from a file"
        raise ConfigError(f"{given}: {reason}; allowed: on the command line")
    kinds = {name: cls.__annotations__[name] for launcher, cls in LAUNCHERS.items() for name in OPTIONS[launcher]}
    if name == "_target_":
        raise ConfigError(f"{given}: would be imported and called; allowed: no _target_")
    if name not in kinds:
        raise ConfigError(f"{given}: unknown key; allowed: {', '.join(kinds)}")
    if value is None and "None" in kinds[name]:
        return None
    is_whole = type(value) is int and 0 <= value <= LARGEST
    if name == "workers" and (is_whole or value == "auto"):
        return value
    if kinds[name].startswith("int") and not is_whole:
        raise ConfigError(f"{given}: wrong type ({type(value).__name__}); allowed: an integer")
    if not is_whole and not (isinstance(value, str) and _WORD.fullmatch(value)):
        raise ConfigError(f"{given}: not a plain word; allowed: letters, digits and . , : + @ % = & | * ( ) [ ] _ -")
    return value if kinds[name].startswith("int") else str(value)


def launch_of(name: str, folder: Path | None) -> tuple[str | None, dict[str, Any]]:
    """The launcher that a study, or one that it builds on, chooses, and the options that it gives to any.

    Raises ConfigError for a file that says what it may not, and for studies that build on each other.
    """
    launcher: str | None = None
    options: dict[str, Any] = {}
    for content in chain("study", name, folder):
        launcher = launcher or content.launcher
        options = {**content.options, **options}
    return launcher, options


def words_of_size(size: str, study: str, folder: Path | None) -> dict[str, str]:
    """What a size of a study, or of one that it builds on, says in place of its own values: words by their keys.

    Raises ConfigError for a size that there is not, and as `launch_of`.
    """
    sizes: dict[str, dict[str, Any]] = {}
    for content in chain("study", study, folder):
        found = content.fields.get("hydra", {}).get("sweeper", {}).get("sizes", {})
        sizes = {name: {**words, **sizes.get(name, {})} for name, words in {**sizes, **found}.items()}
    if size not in sizes:
        allowed = f"{', '.join(sizes)}, or no size" if sizes else "no size, for it is of one"
        raise ConfigError(f"size={size}: study={study} has no such size; allowed: {allowed}")
    return {key: f"{key}={'null' if value is None else str(value).strip()}" for key, value in sizes[size].items()}


def chain(group: str, name: str, folder: Path | None) -> list[Content]:
    """A file and those that it builds on, as far as they are files. Raises ConfigError if that never ends."""
    contents: dict[str, Content] = {}
    base: str | None = name
    while base is not None:
        if (place := place_of(group, base, folder)) is None:
            break  # a kind of fault, or Hydra will say that there is none
        if base in contents or len(contents) == MOST_BASES:
            names = " -> ".join((*contents, base))
            raise ConfigError(f"{group}={name}: builds on {names}; allowed: at most {MOST_BASES}, and not on itself")
        contents[base] = read(place, group, base)
        base = contents[base].base
    return list(contents.values())
