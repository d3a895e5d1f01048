"""`stability-harness sweep`, or `python -m sweeps`: the only Hydra application of the project."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.basics.terminal import Terminal
from harness.basics.version import version_line
from harness.config import ConfigError
from sweeps.commands import status
from sweeps.commands.catalogue import folder_beside_list, is_list, print_catalogue
from sweeps.commands.ending import ended
from sweeps.compose.arguments import (
    check_command_line,
    check_flags,
    checked_overrides,
    explain,
    folder_of,
    is_hydras,
    options_of,
    question_of,
)
from sweeps.compose.folders import read
from sweeps.compose.hydra_calls import CONFIG_NAME, FOLDER, Call, config_loader, multirun, run
from sweeps.compose.mitigations import in_parts
from sweeps.compose.origins import with_origins
from sweeps.compose.overrides import with_homes
from sweeps.compose.places import check_folder, place_of
from sweeps.compose.settings import RunSettings, run_from

if TYPE_CHECKING:
    from sweeps.running.launch import Begun


@hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=CONFIG_NAME)
def application(config: DictConfig) -> None:
    """Never reached by our launchers, which train packs and not single jobs."""
    raise ConfigError("hydra.mode=RUN: every call is a sweep; allowed: MULTIRUN")


def main() -> None:
    """`python -m sweeps`."""
    if (status := ended(lambda: command(sys.argv[1:]))) is not None:
        sys.exit(status)


def command(arguments: list[str]) -> int | None:
    """What the words after `stability-harness sweep` ask for. Returns the exit status. Raises ConfigError."""
    if "--version" in arguments:  # Hydra would name its own
        print(version_line())
        return None
    if arguments and arguments[0] in status.ACTS:
        return status.run(arguments, Terminal()) or None
    arguments = with_homes(arguments)
    if is_list(arguments):
        print_catalogue(folder_beside_list(arguments), Terminal())
        return None
    with explained(arguments):
        return answer(arguments) if question_of(options_of(arguments)) else sweep(arguments)[0]


@contextlib.contextmanager
def explained(arguments: Sequence[str]) -> Iterator[None]:
    """Raises ConfigError for what Hydra, the YAML files of a command line and the disk object to."""
    try:
        yield
    except ConfigError as error:
        raise with_origins(error, arguments) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise explain(error, arguments) from error
    except OSError as error:  # a full disk, or a right that is missing: nothing that the code could help
        where = error.filename or next((text for text in arguments if text.startswith("out=")), "this command")
        reason = error.strerror or str(error)
        allowed = "a disk with room, and files that you may read and write"
        raise ConfigError(f"{where}: {reason}; allowed: {allowed}") from error


def sweep(arguments: list[str], console: Terminal | None = None, more: Begun | None = None) -> tuple[int, RunSettings]:
    """What Hydra does with --multirun, once the command line is checked.

    Returns the exit status and what was run, `more` in place of what the words ask for; `console` is told of it. Raises
    ConfigError.
    """
    arguments = with_homes(arguments)
    config, _ = check_command_line(arguments)
    study, folder = config.hydra.runtime.choices.study, folder_of(arguments)
    # Without Hydra's own, which may be lines of a job's script.
    words = (*([f"--config-dir={folder.absolute()}"] if folder else []), *map(str, config.hydra.overrides.task))
    call = Call(folder, console, options_of(arguments).verbose, _question(study, folder), words, more)
    status = multirun(application, config, call)
    return status, run_from(study, OmegaConf.to_container(config))  # type: ignore[arg-type]


def _question(study: str, folder: Path | None) -> str:
    """What a study's file says that it asks."""
    place = place_of("study", study, folder)
    return read(place, "study", study).about.question if place else ""


def answer(arguments: Sequence[str]) -> int:
    """Have Hydra print what its --help, --hydra-help, --cfg, --info or --shell-completion ask for.

    Returns the exit status. Raises ConfigError.
    """
    options, folder = options_of(arguments), folder_of(arguments)
    check_flags(options)
    check_folder(folder)
    overrides = list(options.overrides)
    if not options.shell_completion:  # whose overrides are its own
        overrides = in_parts(checked_overrides(overrides, config_loader(folder), folder), folder)
    if options.hydra_help:
        # Hydra's own logging, which it would set up here, closes whatever this process logs to.
        overrides = [*(text for text in overrides if is_hydras(text)), "hydra/hydra_logging=none"]
    try:
        return run(application, [*question_of(options), *overrides], Call(folder))
    except (HydraException, OmegaConfBaseException, ConfigError):
        raise
    except (ValueError, KeyError, RuntimeError) as error:  # how Hydra refuses flags that do not go together
        raise ConfigError(f"{' '.join(arguments)}: {error}; allowed: see --help") from None
