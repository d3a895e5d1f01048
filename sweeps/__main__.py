"""`python -m sweeps`: the only Hydra application of the project."""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError
from sweeps.grid import explain, fault_schemas, schema


def register() -> None:
    """Put the dataclasses' defaults where Hydra composes from."""
    store = ConfigStore.instance()
    store.store(name="schema", node=schema())
    for kind, node in fault_schemas().items():
        store.store(group="fault", name=kind, node=node)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def application(config: DictConfig) -> None:
    """Never reached by our launchers, which train packs and not single jobs."""
    raise ConfigError("hydra/launcher: trains one job at a time; allowed: local, slurm")


def main() -> None:
    """Run a sweep. Wrong input is one line on standard error, and exit status 2."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # otherwise Hydra prints and exits itself
    register()
    try:
        application()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error, sys.argv[1:])}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
