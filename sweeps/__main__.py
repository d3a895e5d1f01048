"""`python -m sweeps`: the only Hydra application of the project."""

from __future__ import annotations

import os
import sys

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from harness.config import ConfigError
from sweeps import status
from sweeps.arguments import CONFIG_NAME, FOLDER, check_command_line, explain, is_question
from sweeps.catalogue import folder_beside_list, is_list, print_catalogue
from sweeps.grid import fault_schemas, schema
from sweeps.mitigations import in_parts
from sweeps.overrides import as_sweep
from sweeps.settings import GridOptions, LocalOptions, SlurmOptions

MOST_REASONS = 20


def register() -> None:
    """Put the dataclasses' defaults where Hydra composes from."""
    store = ConfigStore.instance()
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
    register()
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in status.COMMANDS:
            status.run(arguments, Console(markup=False, highlight=False, emoji=False))
            return
        if is_list(arguments):
            print_catalogue(folder_beside_list(arguments), Console(markup=False, highlight=False, emoji=False))
            return
        if is_question(arguments):
            sys.argv[1:] = in_parts(arguments)
        else:
            check_command_line(arguments)
            sys.argv[1:] = map(as_sweep, arguments)
            if not {"--multirun", "-m"} & set(arguments):
                sys.argv.insert(1, "--multirun")  # every call is a sweep, also one of a single trial
        application()
    except ConfigError as error:
        refuse(error)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        refuse(explain(error, arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def refuse(error: ConfigError) -> None:
    """Say what is wrong, and leave with status 2."""
    for reason in error.reasons[:MOST_REASONS]:
        print("error:", reason.replace("\n", "\\n"), file=sys.stderr)
    if len(error.reasons) > MOST_REASONS:
        print(f"error: and {len(error.reasons) - MOST_REASONS} more like these", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
