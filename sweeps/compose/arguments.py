"""The command line and the axes of a study, checked before Hydra acts on any of them."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import OverrideType
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from harness.basics.errors import Parser
from harness.basics.printing import printable
from harness.config import ConfigError, Problems
from sweeps.compose.folders import OPTIONS, launch_of, words_of_size
from sweeps.compose.hydra_calls import CONFIG_NAME, config_loader
from sweeps.compose.overrides import (
    RUN_KEYS,
    Axis,
    as_sweep,
    axis_of,
    check_jobs,
    known_keys,
    parse,
    quoted_out,
    unknown_key,
)
from sweeps.compose.places import check_folder, named, unknown_option
from sweeps.compose.settings import LAUNCHERS, GridOptions, LocalOptions
from sweeps.compose.yaml_files import has_control, not_yaml, told_of

OF_HYDRA = ("hydra/launcher", "hydra/sweeper", "hydra.mode")  # that act on a command line, beside hydra.launcher.*
INSTEAD = {"hydra.run.": "out=DIR", "hydra.sweep.": "out=DIR", "hydra.sweeper.params.": "the key itself, KEY=VALUES"}
_SWITCHES = ("--help -h", "--hydra-help", "--resolve", "--run -r", "--multirun -m", "--shell-completion -sc")
_WITH_VALUES = ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd", "--experimental-rerun")
_ASKED = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS: dict[str, dict[str, Any]] = {  # as in Hydra's manual, under "Hydra's command line flags"
    **dict.fromkeys(_SWITCHES, {"action": "store_true"}),
    **dict.fromkeys(_WITH_VALUES, {}),
    "--cfg -c": {"choices": ("job", "hydra", "all")},
    "--info -i": {"nargs": "?", "const": "all", "choices": _ASKED},
    "--verbose": {"action": "store_true"},  # our own
}
REHEARSALS = ("--dry-run", "--dry_run", "--dryrun", "--plan", "-n")  # as other programs call it
SILENT_LOGGING = {"version": 1, "root": None, "disable_existing_loggers": False}


def is_hydras(text: str) -> bool:
    """Whether an override sets one of Hydra's own keys."""
    return text.lstrip("+~").startswith(("hydra.", "hydra/"))


def check_of_run(words: Sequence[str]) -> None:
    """Raises ConfigError for words that say something of trials, where it is settled which are trained."""
    problems = Problems()
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key == "out" or (key not in RUN_KEYS and not is_hydras(word)):
            reason = "is not of the run, and which trials are trained is settled"
            allowed = ", ".join(sorted(RUN_KEYS - {"out"}))
            problems.reasons[f"{word}: {reason}; allowed: {allowed}, hydra/launcher, hydra.launcher.*"] = None
    problems.check()


def _hydras_key(text: str) -> str:
    override = parse(text)
    key = override.get_key_element().lstrip("+~")
    if override.type is OverrideType.DEL or override.package is not None:
        raise ConfigError(f"{text}: keys cannot be removed or moved; allowed: key=value")
    if key not in OF_HYDRA and not key.startswith("hydra.launcher."):
        instead = "".join(f"{other}; " for start, other in INSTEAD.items() if key.startswith(start))
        raise ConfigError(f"{text}: has no effect here; allowed: {instead}of hydra.*: hydra/launcher, hydra.launcher.*")
    if override.is_sweep_override():
        raise ConfigError(f"{text}: belongs to the run and cannot be swept; allowed: one value")
    value = override.value()
    if "/" in key and not (isinstance(value, str) and re.fullmatch(r"[\w-]+", value)):
        raise ConfigError(f"{text}: not a name; allowed: one name")
    return key


def check_arguments(arguments: Sequence[str], loader: ConfigLoader) -> None:
    """Raises ConfigError with everything that is wrong with the overrides of the command line, taken one by one."""
    problems = Problems()
    given: dict[str, list[str]] = {}
    for text in arguments:
        with problems.collect():
            key = _hydras_key(text) if is_hydras(text) else axis_of(text, loader).key
            given.setdefault(key, []).append(text)
    for key, texts in given.items():
        if len(texts) > 1:
            problems.reasons[f"{' '.join(texts)}: {key} is given {len(texts)} times; allowed: once"] = None
    problems.check()


def axes_of(params: Mapping[str, Any], arguments: Sequence[str], loader: ConfigLoader) -> list[Axis]:
    """The study's axes and the command line's, whose keys replace those of the study. Raises ConfigError."""
    axes: dict[str, Axis] = {}
    problems = Problems()
    for name in params:
        if name in RUN_KEYS or name in ("study", "search"):
            reason = "belongs to the run, not to hydra.sweeper.params; allowed there: what can be swept"
            problems.reasons[f"{name}={params[name]}: {reason}"] = None
    of_study = (f"{key}={'null' if value is None else str(value).strip()}" for key, value in params.items())
    for text in (*of_study, *arguments):
        with problems.collect():
            axis = axis_of(text, loader)
            axes[axis.key] = axis
    problems.check()
    return list(axes.values())


def expand(
    params: Mapping[str, Any],
    arguments: Sequence[str],
    loader: ConfigLoader,
    grids: Mapping[str, Mapping[str, Any]] | None = None,
    conditions: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[list[str]]:
    """Every combination of the values of `axes_of`, as overrides, the last axis running fastest. Raises ConfigError.

    With `grids`, by name, those of each in turn, with its axes in place of those of `params` that have its keys; with
    `conditions` all of that under each of these in turn, whose axes stand in place of those of `params`, too.
    """
    jobs: list[list[str]] = []
    for condition, grid in itertools.product((conditions or {"": {}}).values(), (grids or {"": {}}).values()):
        axes, problems = axes_of({**params, **(condition or {}), **(grid or {})}, arguments, loader), Problems()
        with problems.collect():
            check_jobs(axes, len(jobs))
        reason = "an interval has no grid; allowed: values with commas, range(), or a search=NAME"
        problems.reasons |= {f"{axis.text}: {reason}": None for axis in axes if axis.interval}
        problems.check()
        jobs += (list(job) for job in itertools.product(*(axis.overrides for axis in axes)))
    return jobs


# --- the whole command line --------------------------------------------------------------------------------------


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags and overrides of a command line, as Hydra takes them apart. Raises ConfigError, and prints nothing."""
    if unprintable := dict.fromkeys(printable(text) for text in arguments if has_control(text)):
        reason = "control characters, or bytes that are no UTF-8; allowed: printable text"
        raise ConfigError(*(f"{text}: {reason}" for text in unprintable))
    parser = _Parser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for names, kind in FLAGS.items():
        parser.add_argument(*names.split(), **kind)
    return parser.parse_intermixed_args(list(arguments))  # overrides may stand on both sides of a flag


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        flags = "--config-dir DIR, -m, --verbose, --help, --list, --cfg, --info"
        hint = " (did you mean plan=true?)" if any(word in message.split() for word in REHEARSALS) else ""
        raise ConfigError(f"{message}{hint}; allowed: KEY=VALUE, {flags}")


def question_of(options: argparse.Namespace) -> list[str]:
    """The flags by which Hydra is to answer something, and not to run; none if there are none."""
    if not (options.help or options.hydra_help or options.cfg or options.info or options.shell_completion):
        return []
    switches = [name for name in ("help", "hydra_help", "resolve", "shell_completion") if getattr(options, name)]
    values = {name: getattr(options, name) for name in ("cfg", "info", "package")}
    flags = [*switches, *(f"{name}={value}" for name, value in values.items() if value is not None)]
    return [f"--{word.replace('_', '-', 1)}" for word in flags]


def folder_of(arguments: Sequence[str]) -> Path | None:
    """The user's own folder that a command line names."""
    return named(options_of(arguments).config_dir)


def check_flags(options: argparse.Namespace, *others: str) -> None:
    """Raises ConfigError for flags that belong to other programs of Hydra's, and for those named in `others`."""
    names = ("config_name", "config_path", "experimental_rerun", "run", *others)
    if given := [f"--{name.replace('_', '-')}={value}" for name in names if (value := getattr(options, name))]:
        raise ConfigError(*(f"{flag}: not for sweeps; allowed: --config-dir, -m" for flag in given))


def check_command_line(arguments: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """What Hydra makes of a command line, and the overrides of which it makes that.

    Raises ConfigError with everything that is wrong, before Hydra acts on it.
    """
    options, problems = options_of(arguments), Problems()
    folder = named(options.config_dir)
    with problems.collect():
        check_flags(options, "resolve")
    with problems.collect():
        check_folder(folder)
    problems.check()
    loader = config_loader(folder)
    overrides = [*map(as_sweep, checked_overrides(options.overrides, loader, folder))]
    config = loader.load_configuration(CONFIG_NAME, overrides, run_mode=RunMode.MULTIRUN)
    check_composed(config)
    return config, overrides


def checked_overrides(given: Sequence[str], loader: ConfigLoader, folder: Path | None) -> list[str]:
    """The overrides of a command line, and before them what its study says to the launcher, or in another size.

    Raises ConfigError with everything that is wrong with them, taken one by one.
    """
    overrides = [quoted_out(text) for text in given]
    check_arguments(overrides, loader)
    values = {parse(text).get_key_element().lstrip("+"): parse(text).value() for text in overrides}
    study = str(values.get("study", "grid"))
    launcher, options = launch_of(study, folder and folder.absolute())
    chosen = str(values.get("hydra/launcher", launcher or "local"))
    from_study = [] if "hydra/launcher" in values or launcher is None else [f"hydra/launcher={launcher}"]
    for name in OPTIONS.get(chosen, ()):
        if name in options and f"hydra.launcher.{name}" not in values:
            value = options[name]
            word = "null" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
            from_study.append(f"hydra.launcher.{name}={word}")
    if (size := values.get("size")) is not None:
        words = words_of_size(str(size), study, folder and folder.absolute())
        with told_of(f"study={study}, size={size}"):
            _check_size(list(words.values()), loader)
        from_study += [word for key, word in words.items() if key not in values]
    return [*from_study, *overrides]


def _check_size(words: Sequence[str], loader: ConfigLoader) -> None:
    problems = Problems()
    for word in words:
        key = word.partition("=")[0]
        if key in RUN_KEYS or key in ("study", "search") or is_hydras(word):
            problems.reasons[f"{word}: belongs to the run, and to no size; allowed there: what can be swept"] = None
        else:
            with problems.collect():
                axis_of(word, loader)
    problems.check()


# --- what Hydra made of it -------------------------------------------------------------------------------------


def check_composed(config: DictConfig) -> None:
    """Refuse a configuration that would have Hydra call anything but our sweeper and launchers.

    Hydra imports and calls what a `_target_` names, and what its logging sections name, before any plugin runs.
    Raises ConfigError.
    """
    choices, mode = config.hydra.runtime.choices, config.hydra.mode
    launcher, sweeper = choices["hydra/launcher"], choices["hydra/sweeper"]
    values: Any = OmegaConf.to_container(config, resolve=False)
    reasons = []
    if launcher not in LAUNCHERS:
        reasons.append(f"hydra/launcher={launcher}: trains no packs; allowed: {', '.join(LAUNCHERS)}")
    if sweeper != "grid":
        reasons.append(f"hydra/sweeper={sweeper}: plans no packs; allowed: grid")
    is_ours = not reasons
    if mode is not None and mode.name != "MULTIRUN":
        reasons.append(f"hydra.mode={mode.name}: every call is a sweep; allowed: MULTIRUN")
    for name in ("hydra_logging", "job_logging"):
        if values["hydra"][name] != SILENT_LOGGING:
            reasons.append(f"hydra.{name}: not the silent one of this program; allowed: leave it out")
    kinds = {"launcher": LAUNCHERS.get(launcher, LocalOptions), "sweeper": GridOptions}
    ours = {f"hydra.{part}._target_": vars(kind())["_target_"] for part, kind in kinds.items()}
    for key, value in {**dict.fromkeys(ours), **dict(_targets(values))}.items():
        if key not in ours or (value != ours[key] and is_ours):
            allowed = ours.get(key, "no _target_")
            reasons.append(f"{key}={value}: would be imported and called; allowed: {allowed}")
    if reasons:
        raise ConfigError(*reasons)


def _targets(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if key == "_target_":
                yield f"{prefix}{key}", value
            yield from _targets(value, f"{prefix}{key}.")


def explain(error: BaseException, arguments: Sequence[str]) -> ConfigError:
    """What Hydra refused, as one line that names key, value and what is allowed, as far as it can be known."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return unknown_option(group, name, [*LAUNCHERS] if group == "hydra/launcher" else error.options)
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    given = {key: value for key, _, value in (text.partition("=") for text in arguments)}
    launcher = LAUNCHERS.get(given.get("hydra/launcher", "local"), LocalOptions)
    options = [f"hydra.launcher.{name}" for name in vars(launcher()) if name != "_target_"]
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return not_yaml(error.problem_mark.name, error)
    for problem in reversed(chain):
        if isinstance(problem, OmegaConfBaseException) and (key := problem.full_key):
            if isinstance(problem, ConfigAttributeError | ConfigKeyError):
                key = next((text for text in given if text.startswith(f"{key}.")), key)
                is_launchers = key.startswith("hydra.launcher.")
                known = options if is_launchers else [*known_keys(), "hydra.launcher", "hydra/launcher"]
                return unknown_key(key, given.get(key, ""), known)
            value = f"={given[key]}" if key in given else ""
            wanted = str(launcher.__annotations__.get(key.rpartition(".")[2], "see --hydra-help"))
            return ConfigError(f"{key}{value}: {(problem.msg or '').partition(chr(10))[0]}; allowed: {wanted}")
    return ConfigError(" ".join(str(error).split()) or type(error).__name__)
