"""How Hydra is called, by its public names. What is private of it, or of OmegaConf, stands in this file alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig
from omegaconf._utils import get_yaml_loader
from omegaconf.basecontainer import BaseContainer

FOLDER = Path(__file__).parents[1] / "conf"
CONFIG_NAME = "config"
OWN_FILES = "command-line"  # who provides a user's folder, as Hydra calls it


@dataclass(frozen=True)
class Call:
    """What our plugins are told of a call, beside its command line."""

    folder: Path | None = None  # the user's own, of --config-dir
    console: Any = None  # where a sweep tells of itself; None: standard output
    is_verbose: bool = False
    question: str = ""  # what its study asks
    words: tuple[str, ...] = ()  # of its command line, without Hydra's own
    more: Any = None  # `sweeps.running.launch.Begun`: what is trained in place of what the words ask for


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def current() -> Call:
    """The call that is under way."""
    return _current.get() or Call()


@contextmanager
def calling(call: Call) -> Iterator[None]:
    """Within, Hydra is ours; afterwards it is again as somebody else in this process has initialized it."""
    before, token = GlobalHydra.instance().hydra, _current.set(call)
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        _current.reset(token)
        GlobalHydra.instance().hydra = before


def run(application: Callable[[], None], arguments: Sequence[str], call: Call) -> int:
    """Have a function under `hydra.main` act on a command line. Returns the exit status, and raises as Hydra does."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors and exits itself
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        with calling(call):
            application()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def multirun(application: Callable[[DictConfig], None], config: DictConfig, call: Call) -> int:
    """What Hydra does with --multirun and a command line of which `config` was composed. Returns the exit status.

    `hydra.main` would compose that twice more, which is most of what a small sweep's plan takes.
    """
    loader = config_loader(call.folder)
    with calling(call):
        context = HydraContext(config_loader=loader, callbacks=cast(Any, None))  # there are none: they are refused
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=application, config=config
        )
        try:
            sweeper.sweep(arguments=[str(text) for text in config.hydra.overrides.task])
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def config_loader(folder: Path | None = None) -> ConfigLoader:
    """What composes configurations of our files, and of a user's `folder`."""
    with calling(Call(folder)):
        initialize_config_dir(str(FOLDER), job_name="sweeps", version_base="1.3")
        return GlobalHydra.instance().config_loader()


def set_sources(path: ConfigSearchPath, packages: Sequence[Path]) -> None:
    """Have all files read by the source `checked://` of hydra_plugins: ours, those of `packages`, and a user's own."""
    if _current.get() is None:  # another application
        return
    for element in path.get_path():
        if element.provider == "main":
            element.path = f"checked://{FOLDER}"
    for package in packages:
        path.append("packages", f"checked://{package.absolute()}")
    if folder := current().folder:
        path.append(OWN_FILES, f"checked://{folder.absolute()}")


def own_folder(loader: ConfigLoader) -> Path | None:
    """The user's folder with which it was made."""
    return next((Path(source.path) for source in loader.get_sources() if source.provider == OWN_FILES), None)


@cache
def yaml_loader() -> Any:
    """OmegaConf's safe loader: numbers and words are those that Hydra would read. It has no public one."""
    return get_yaml_loader()


@cache
def fast_yaml_loader() -> Any:
    """The same by libyaml, in a tenth of the time; None where PyYAML was built without that."""
    if not yaml.__with_libyaml__:
        return None

    parser = yaml.cyaml.CParser  # type: ignore[attr-defined]

    def begin(self: Any, stream: str) -> None:
        parser.__init__(self, stream)
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)

    # libyaml's reader, with what OmegaConf's loader makes of numbers, words and keys.
    return type("FastLoader", (parser, yaml_loader()), {"__init__": begin})


@contextmanager
def resolvers_put_back() -> Iterator[None]:
    """Hydra registers resolvers, perhaps in place of a notebook's; OmegaConf has no public way to ask for those."""
    before = dict(BaseContainer._resolvers)
    try:
        yield
    finally:
        BaseContainer._resolvers.clear()
        BaseContainer._resolvers.update(before)
