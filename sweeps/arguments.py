"""The command line and the axes of a study, checked before Hydra acts on any of them."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, OverrideType, ValueType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.config import IDENTITY, ConfigError, Problems, Trial, checked, field_types, sections
from injectors import fault_types
from sweeps import settings
from sweeps.choices import listed, parts_of, unknown_option

FOLDER, CONFIG_NAME = Path(__file__).parent / "conf", "config"
GROUPS = ("study", "search", "mitigation", "fault")
RUN_KEYS = frozenset(settings.keys())
LAUNCHERS = {"local": settings.LocalOptions, "slurm": settings.SlurmOptions}
SILENT_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)")


@cache
def trial_fields() -> dict[str, tuple[type, str]]:
    """key -> (dataclass, field), for every key of a trial but those of its fault."""
    found = {f"{part}.{name}": (cls, name) for part, cls in sections().items() for name in field_types(cls)}
    return {**found, "seed": (Trial, "seed")}


@cache
def fault_fields() -> dict[str, tuple[type, ...]]:
    """key -> the kinds of fault that have this field."""
    found: dict[str, tuple[type, ...]] = {}
    kinds: Mapping[str, type] = fault_types()
    for kind, cls in kinds.items():
        for name in field_types(cls) if kind != "none" else ():
            if name not in IDENTITY:
                found[f"fault.{name}"] = (*found.get(f"fault.{name}", ()), cls)
    return found


@cache
def known_keys() -> tuple[str, ...]:
    """Every key that the command line may have, `hydra.*` apart."""
    return tuple(sorted({*trial_fields(), *fault_fields(), *RUN_KEYS, *GROUPS}))


def unknown_key(key: str, value: Any, known: Iterable[str], where: str = "") -> ConfigError:
    known = list(known)
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    section = f"{key.split('.')[0]}."
    near = [k for k in known if k.startswith(section)] or sorted({k.split(".")[0] for k in known})
    return ConfigError(f"{key}={value}: unknown key{where}; {hint}allowed: {', '.join(near)}")


# --- one override ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=100_000)
def parse(text: str) -> Override:
    """Raises ConfigError for what is no override."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).split("\n")[0].removeprefix(f"Error parsing override '{text}'").strip()
        raise ConfigError(f"{text}: not an override{f' ({reason})' if reason else ''}; allowed: key=value") from None


@lru_cache(maxsize=100_000)
def assignment(text: str) -> tuple[str, Any]:
    """The key and the value of an override that is no sweep. A trial's value is checked and has the field's type.

    Raises ConfigError.
    """
    key, _, word = text.partition("=")
    # The grammar takes a millisecond, which is long for the thousands of integers of a range.
    value = int(word) if _NUMBER.fullmatch(word) else parse(text).value()
    return key, check_value(key, value)


def check_value(key: str, value: Any) -> Any:
    """`value` as the key wants it. Raises ConfigError for a key that is none, or a value that it does not take."""
    if key in trial_fields():
        return checked(key, *trial_fields()[key], value)
    if key in RUN_KEYS:
        return settings.check_key(key, value)
    if key in fault_fields():
        _, name = key.split(".")
        problems = [Problems() for _ in fault_fields()[key]]
        for cls, problem in zip(fault_fields()[key], problems, strict=True):
            with problem.collect():
                checked(key, cls, name, value)
        if all(problem.reasons for problem in problems):
            problems[0].check()
        return value
    if key in GROUPS:
        return value
    raise unknown_key(key, value, known_keys())


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, which a search may try; on a logarithmic scale if `is_log`."""

    low: float
    high: float
    is_log: bool


def _interval(override: Override) -> Interval:
    """Raises ConfigError for an interval that is empty, or that has other tags than `log`."""
    sweep, text = override.value(), override.input_line
    assert isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None
    if override.get_key_element() in GROUPS:
        raise ConfigError(f"{text}: names have no interval; allowed: values with commas, or glob()")
    if not sweep.start < sweep.end:
        raise ConfigError(f"{text}: an empty interval; allowed: interval(low, high) with low < high")
    if sweep.tags - {"log"}:
        raise ConfigError(f"{text}: unknown tag {', '.join(sorted(sweep.tags - {'log'}))}; allowed: log")
    is_log = "log" in sweep.tags
    if is_log and sweep.start <= 0:
        raise ConfigError(f"{text}: no logarithm at {sweep.start:g}; allowed: tag(log, interval(...)) above 0")
    return Interval(sweep.start, sweep.end, is_log)


def _words(override: Override, loader: ConfigLoader) -> list[str]:
    """The values of an override, one or many, each as its own text; the two ends of an interval."""
    text = f"{override.input_line}"
    key = override.get_key_element()
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        if key not in GROUPS:
            raise ConfigError(f"{text}: a glob needs names to match; allowed: values, or glob() for mitigation, fault")
        (matched,) = OverridesParser.create(config_loader=loader).parse_overrides([text])
        found = list(matched.sweep_string_iterator())
        if not found:
            raise ConfigError(f"{text}: matches nothing; allowed: {listed(loader.get_group_options(key))}")
        return found
    if override.is_interval_sweep():
        interval = _interval(override)
        return [f"{end:.12g}" for end in (interval.low, interval.high)]
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


@dataclass(frozen=True)
class Axis:
    """A key and its values, each as text; or all of an interval, and its two ends as text."""

    key: str
    words: tuple[str, ...]
    interval: Interval | None
    is_range: bool  # numbers at equal distances

    @property
    def overrides(self) -> list[str]:
        return [f"{self.key}={word}" for word in self.words]


def _axis(text: str, loader: ConfigLoader) -> Axis:
    """The key of an override and all its values, each checked. Raises ConfigError."""
    override = parse(text)
    key, value = override.get_key_element(), override.get_value_string() if "=" in text else ""
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise ConfigError(f"{text}: keys cannot be added or removed; allowed: key=value")
    if key not in known_keys():
        raise unknown_key(key, value, known_keys())
    words = _words(override, loader)
    if not words:
        raise ConfigError(f"{text}: an empty range; allowed: at least one value")
    if len(words) > 1 and (key in RUN_KEYS or key in ("study", "search")):
        raise ConfigError(f"{text}: belongs to the run and cannot be swept; allowed: one value")
    problems = Problems()
    options = loader.get_group_options(key) if key in GROUPS else []
    for word in words:
        with problems.collect():
            found = assignment(f"{key}={word}")[1]
            if key == "mitigation":
                parts_of(found, options)
            elif key in GROUPS and found not in options:
                raise unknown_option(key, word, options)
    problems.check()
    interval = _interval(override) if override.is_interval_sweep() else None
    return Axis(key, tuple(words), interval, override.is_range_sweep())


def combination(text: str) -> str | None:
    """The value of an override that chooses one combination of mitigations, as it is written; else None."""
    if not text.startswith("mitigation=") or "+" not in text:
        return None
    override = parse(text)
    return None if override.is_sweep_override() else override.get_value_element_as_str()


def as_sweep(text: str) -> str:
    """A combination of mitigations as a sweep of one value, which Hydra leaves alone; else it looks for such a file."""
    name = combination(text)
    return text if name is None else f"mitigation=choice({name})"


# --- all of them -------------------------------------------------------------------------------------------------


def is_hydras(text: str) -> bool:
    return text.lstrip("+~").startswith(("hydra.", "hydra/"))


def _hydras_key(text: str) -> str:
    if parse(text).is_sweep_override():
        raise ConfigError(f"{text}: belongs to the run and cannot be swept; allowed: one value")
    return parse(text).get_key_element()


def check_arguments(arguments: Sequence[str], loader: ConfigLoader) -> None:
    """Raises ConfigError with everything that is wrong with the overrides of the command line, taken one by one."""
    problems = Problems()
    given: dict[str, list[str]] = {}
    for text in arguments:
        with problems.collect():
            key = _hydras_key(text) if is_hydras(text) else _axis(text, loader).key
            given.setdefault(key, []).append(text)
    for key, texts in given.items():
        with problems.collect():
            if len(texts) > 1:
                raise ConfigError(f"{' '.join(texts)}: {key} is given {len(texts)} times; allowed: once")
    problems.check()


def axes_of(params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader) -> list[Axis]:
    """The study's axes and the command line's, whose keys replace those of the study. Raises ConfigError."""
    axes: dict[str, Axis] = {}
    problems = Problems()
    for name in params:
        with problems.collect():
            if name in RUN_KEYS or name in ("study", "search"):
                beside = "belongs to the run, not to hydra.sweeper.params; allowed there: what can be swept"
                raise ConfigError(f"{name}={params[name]}: {beside}")
    for text in (*(f"{key}={_as_text(value)}" for key, value in params.items()), *arguments):
        with problems.collect():
            axis = _axis(text, loader)
            axes[axis.key] = axis
    problems.check()
    return list(axes.values())


def expand(params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader) -> list[list[str]]:
    """Every combination of the values of `axes_of`, as overrides, the last axis running fastest. Raises ConfigError."""
    axes, problems = axes_of(params, arguments, loader), Problems()
    for axis in axes:
        with problems.collect():
            if axis.interval:
                words = f"interval({', '.join(axis.words)})"
                reason = "an interval has no grid; allowed: values with commas, range(), or a search=NAME"
                raise ConfigError(f"{axis.key}={words}: {reason}")
    problems.check()
    return [list(job) for job in itertools.product(*(axis.overrides for axis in axes))]


def _as_text(value: Any) -> str:
    return "null" if value is None else str(value)


# --- the whole command line --------------------------------------------------------------------------------------


def is_question(arguments: Sequence[str]) -> bool:
    """Whether Hydra is to answer something, and not to run."""
    options = get_args_parser().parse_args(list(arguments))
    return bool(options.help or options.hydra_help or options.cfg or options.info or options.shell_completion)


def folder_of(arguments: Sequence[str]) -> Path | None:
    """The user's own folder that a command line names."""
    name = get_args_parser().parse_args(list(arguments)).config_dir
    return Path(name) if name else None


def config_loader(folder: Path | None = None) -> ConfigLoader:
    """The loader that Hydra itself makes: our configuration, and before it a user's folder."""
    path = create_config_search_path(str(FOLDER))
    if folder:
        path.prepend("command-line", f"file://{folder.absolute()}", SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(path)


def check_folder(folder: Path | None) -> None:
    """Raises ConfigError for a --config-dir that is none."""
    wrong = None
    if folder and not folder.is_dir():
        wrong = "no such folder"
    elif folder and (folder / f"{CONFIG_NAME}.yaml").exists():
        wrong = f"its {CONFIG_NAME}.yaml would take the place of this program's own"
    if wrong:
        wanted = "a folder with studies in study/, mitigations in mitigation/ or faults in fault/"
        raise ConfigError(f"--config-dir={folder}: {wrong}; allowed: {wanted}")


def check_command_line(arguments: Sequence[str]) -> None:
    """Raises ConfigError with everything that is wrong with a command line, before Hydra acts on it."""
    options, problems = get_args_parser().parse_args(list(arguments)), Problems()
    for name in ("config_name", "config_path", "experimental_rerun", "run"):
        if getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            problems.reasons[f"{flag}={getattr(options, name)}: not for sweeps; allowed: --config-dir, -m"] = None
    folder = folder_of(arguments)
    with problems.collect():
        check_folder(folder)
    loader = config_loader(folder)
    with problems.collect():
        check_arguments(options.overrides, loader)
    problems.check()
    overrides = [as_sweep(text) for text in options.overrides]
    check_composed(loader.load_configuration(CONFIG_NAME, overrides, run_mode=RunMode.MULTIRUN))


# --- what Hydra made of it -------------------------------------------------------------------------------------


def check_composed(config: DictConfig) -> None:
    """Refuse a configuration that would have Hydra call anything but our sweeper and launchers.

    Hydra imports and calls what a `_target_` names, and what its logging sections name, before any plugin runs.
    Raises ConfigError.
    """
    problems = Problems()
    hydra, choices = config.hydra, config.hydra.runtime.choices
    values = OmegaConf.to_container(config, resolve=False)
    with problems.collect():
        if choices["hydra/launcher"] not in LAUNCHERS:
            name = choices["hydra/launcher"]
            raise ConfigError(f"hydra/launcher={name}: trains no packs; allowed: {', '.join(LAUNCHERS)}")
        _check_target("hydra.launcher", hydra.launcher, LAUNCHERS[choices["hydra/launcher"]])
    with problems.collect():
        if choices["hydra/sweeper"] != "grid":
            raise ConfigError(f"hydra/sweeper={choices['hydra/sweeper']}: plans no packs; allowed: grid")
        _check_target("hydra.sweeper", hydra.sweeper, settings.GridOptions)
    with problems.collect():
        if hydra.mode is not None and hydra.mode.name != "MULTIRUN":
            raise ConfigError(f"hydra.mode={hydra.mode.name}: every call is a sweep; allowed: MULTIRUN")
    for name in ("hydra_logging", "job_logging"):
        with problems.collect():
            if values["hydra"][name] != SILENT_LOGGING:  # type: ignore[call-overload, index]
                raise ConfigError(f"hydra.{name}: not the silent one of this program; allowed: leave it out")
    for key, value in _targets(values):
        with problems.collect():
            if key not in ("hydra.launcher._target_", "hydra.sweeper._target_"):
                raise ConfigError(f"{key}={value}: would be imported and called; allowed: no _target_")
    problems.check()


def _check_target(key: str, node: DictConfig, options: type) -> None:
    expected = vars(options())["_target_"]
    if node.get("_target_") != expected:
        raise ConfigError(f"{key}._target_={node.get('_target_')}: would be imported and called; allowed: {expected}")


def _targets(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return []
    here = [(f"{prefix}{key}", value) for key, value in tree.items() if key == "_target_"]
    return here + [found for key, value in tree.items() for found in _targets(value, f"{prefix}{key}.")]


_NO_KEY = re.compile(r"Could not override '([^']+)'")
_BAD_VALUE = re.compile(r"^\s*full_key: (\S+)", re.MULTILINE)


def explain(error: BaseException, arguments: Sequence[str]) -> ConfigError:
    """What Hydra refused, as one line that names key, value and what is allowed, as far as it can be known."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return unknown_option(group, name, [*LAUNCHERS] if group == "hydra/launcher" else error.options)
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    given = {key: value for key, _, value in (text.partition("=") for text in arguments)}
    launcher = LAUNCHERS.get(given.get("hydra/launcher", "local"), settings.LocalOptions)
    options = [f"hydra.launcher.{name}" for name in vars(launcher()) if name != "_target_"]
    for found in map(_NO_KEY.search, map(str, chain)):
        if found:
            key = found[1]
            known = (
                options if key.startswith("hydra.launcher.") else [*known_keys(), "hydra.launcher", "hydra/launcher"]
            )
            return unknown_key(key, given.get(key, ""), known)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{mark.name}: line {mark.line + 1} is not YAML ({error.problem}); allowed: YAML")
    for problem in reversed(chain):
        if found := _BAD_VALUE.search(str(problem)):
            key, reason = found[1], " ".join(str(problem)[: found.start()].split())
            value = f"={given[key]}" if key in given else ""
            wanted = str(launcher.__annotations__.get(key.rpartition(".")[2], "see --hydra-help"))
            return ConfigError(f"{key}{value}: {reason}; allowed: {wanted}")
    return ConfigError(" ".join(str(error).split()) or type(error).__name__)
