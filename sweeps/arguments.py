"""The command line and the axes of a study, checked before Hydra acts on any of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.config import ConfigError, Problems
from sweeps import settings
from sweeps.choices import unknown_option
from sweeps.overrides import RUN_KEYS, Axis, as_sweep, axis_of, known_keys, parse, unknown_key

FOLDER, CONFIG_NAME = Path(__file__).parent / "conf", "config"
LAUNCHERS = {"local": settings.LocalOptions, "slurm": settings.SlurmOptions}
SILENT_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}


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
            key = _hydras_key(text) if is_hydras(text) else axis_of(text, loader).key
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
            axis = axis_of(text, loader)
            axes[axis.key] = axis
    problems.check()
    return list(axes.values())


def expand(params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader) -> list[list[str]]:
    """Every combination of the values of `axes_of`, as overrides, the last axis running fastest. Raises ConfigError."""
    axes, problems = axes_of(params, arguments, loader), Problems()
    for axis in axes:
        with problems.collect():
            if axis.interval:
                reason = "an interval has no grid; allowed: values with commas, range(), or a search=NAME"
                raise ConfigError(f"{axis.text}: {reason}")
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


def check_command_line(arguments: Sequence[str]) -> tuple[DictConfig, ConfigLoader]:
    """What Hydra makes of a command line, and its loader.

    Raises ConfigError with everything that is wrong, before Hydra acts on it.
    """
    options, problems = get_args_parser().parse_args(list(arguments)), Problems()
    for name in ("config_name", "config_path", "experimental_rerun", "resolve", "run"):
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
    config = loader.load_configuration(CONFIG_NAME, overrides, run_mode=RunMode.MULTIRUN)
    check_composed(config)
    return config, loader


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
