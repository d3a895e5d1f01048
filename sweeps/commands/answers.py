"""What Hydra answers instead of running: --help, --hydra-help, --cfg, --info and the completion of shells."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError
from sweeps.compose.arguments import (
    CONFIG_NAME,
    check_flags,
    checked_overrides,
    config_loader,
    folder_of,
    options_of,
    search_path,
)
from sweeps.compose.folders import check_folder
from sweeps.compose.mitigations import in_parts


def answer(arguments: Sequence[str]) -> None:
    """Print it, as Hydra's own main does, but from `search_path`. Raises ConfigError."""
    options, folder = options_of(arguments), folder_of(arguments)
    check_flags(options)
    check_folder(folder)
    overrides = list(options.overrides)
    if not options.shell_completion:  # whose overrides are its own
        overrides = in_parts(checked_overrides(overrides, config_loader(folder), folder), folder)
    hydra = Hydra.create_main_hydra2("sweeps", search_path(folder))
    try:
        if options.help:
            options.overrides = overrides
            hydra.app_help(CONFIG_NAME, get_args_parser(), options)
        elif options.hydra_help:
            options.overrides = [text for text in overrides if text.startswith("hydra")]
            hydra.hydra_help(None, get_args_parser(), options)
        elif options.cfg:
            hydra.show_cfg(CONFIG_NAME, overrides, options.cfg, options.package, options.resolve)
        elif options.shell_completion:
            hydra.shell_completion(CONFIG_NAME, overrides)
        else:
            hydra.show_info(options.info, CONFIG_NAME, overrides)
    except (HydraException, OmegaConfBaseException, ConfigError):
        raise
    except (ValueError, KeyError, RuntimeError) as error:  # how Hydra refuses flags that do not go together
        raise ConfigError(f"{' '.join(arguments)}: {error}; allowed: see --help") from None
    finally:
        GlobalHydra.instance().clear()
