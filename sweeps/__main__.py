"""`python -m sweeps`: the only Hydra application of the project."""

from __future__ import annotations

import os
import sys
from functools import cache

import hydra
import yaml
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, setup_globals
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError
from harness.printing import Terminal, say, warn_in_one_line
from sweeps import status
from sweeps.answers import answer
from sweeps.arguments import CONFIG_NAME, check_command_line, explain, is_question
from sweeps.catalogue import folder_beside_list, is_list, print_catalogue
from sweeps.folders import FOLDER
from sweeps.grid import fault_schemas, schema
from sweeps.homes import with_homes
from sweeps.settings import GridOptions, LocalOptions, SlurmOptions

MOST_REASONS = 20


@cache
def register() -> None:
    """Put the dataclasses' defaults where Hydra composes from; once is enough for a process."""
    store = ConfigStore.instance()
    # Hydra copies it, schemas and all, with every configuration that it composes, and writes into no copy.
    vars(store)["__deepcopy__"] = lambda memo: store
    store.store(name="schema", node=schema())
    for kind, node in fault_schemas().items():
        store.store(group="fault", name=kind, node=node)
    store.store(group="hydra/sweeper", name="grid", node=GridOptions)
    store.store(group="hydra/launcher", name="local", node=LocalOptions)
    store.store(group="hydra/launcher", name="slurm", node=SlurmOptions)


@hydra.main(version_base="1.3", config_path=str(FOLDER), config_name=CONFIG_NAME)
def application(config: DictConfig) -> None:
    """Never reached by our launchers, which train packs and not single jobs."""
    raise ConfigError("hydra.mode=RUN: every call is a sweep; allowed: MULTIRUN")


def main() -> None:
    """Run a sweep. Wrong input is a line each on standard error, and exit status 2."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra prints and exits itself
    warn_in_one_line()
    register()
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in status.COMMANDS:
            if failed := status.run(arguments, Terminal()):
                sys.exit(failed)
            return
        arguments = with_homes(arguments)
        if is_list(arguments):
            print_catalogue(folder_beside_list(arguments), Terminal())
            return
        if is_question(arguments):
            answer(arguments)
        else:
            sweep(arguments)
    except ConfigError as error:
        refuse(error)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        refuse(explain(error, arguments))
    except OSError as error:  # a full disk, or a right that is missing: nothing that the code could help
        where = error.filename or next((text for text in arguments if text.startswith("out=")), "this command")
        reason = error.strerror or str(error)
        refuse(ConfigError(f"{where}: {reason}; allowed: a disk with room, and files that you may read and write"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def sweep(arguments: list[str]) -> None:
    """What Hydra does with --multirun, without composing the same configuration twice more. Raises ConfigError."""
    setup_globals()
    config, loader = check_command_line(arguments)
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    callbacks = Callbacks(config)
    callbacks.on_multirun_start(config=config, config_name=CONFIG_NAME)
    context = HydraContext(config_loader=loader, callbacks=callbacks)
    sweeper = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=application, config=config)
    sweeper.sweep(list(config.hydra.overrides.task))


def refuse(error: ConfigError) -> None:
    """Say what is wrong, and leave with status 2."""
    for reason in error.reasons[:MOST_REASONS]:
        say(f"error: {reason}", file=sys.stderr)
    if len(error.reasons) > MOST_REASONS:
        say(f"error: and {len(error.reasons) - MOST_REASONS} more like these", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
