"""The classes that Hydra insists on finding in this folder; the work is in sweeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

Names = list[str]


class OwnSources(SearchPathPlugin):
    """Our files, and those of --config-dir, are read by `CheckedFolder`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from sweeps.compose.hydra_calls import set_sources
        from sweeps.compose.places import shipped

        set_sources(search_path, shipped()[1:])


class CheckedFolder(ConfigSource):
    """YAML files of which Hydra is given what sweeps/compose/folders.py lets pass; of a user's folder, nothing else."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    @property
    def _is_ours(self) -> bool:
        return self.provider == "main"

    @property
    def _nodes(self) -> dict[str, Any]:
        """What there is beside files, all of it ours."""
        from sweeps.compose.places import nodes

        return nodes() if self._is_ours else {}

    def load_config(self, config_path: str) -> ConfigResult:
        from sweeps.compose import folders
        from sweeps.compose.places import GROUPS
        from sweeps.compose.yaml_files import text_of, tree_of

        config_path = config_path.removesuffix(".yaml")
        group, _, name = config_path.rpartition("/")
        if config_path in self._nodes:
            node = OmegaConf.structured(self._nodes[config_path])
            return ConfigResult(self.provider, self.full_path(), node, {"package": None})
        if group not in GROUPS:
            if not self.is_config(config_path):
                raise ConfigLoadError(f"Config not found : {config_path}")
            text = text_of(self._file(config_path))
            tree, package = tree_of(self._file(config_path), text), dict(folders.header_of(text)).get("package")
        elif files := folders.chain(group, name, Path(self.path)):
            tree, package = files[0].composed, folders.PACKAGES[group]
        else:
            raise ConfigLoadError(f"Config not found : {config_path}")
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(tree), {"package": package})

    def _file(self, config_path: str) -> Path:
        return Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")

    def available(self) -> bool:
        return os.path.isdir(self.path)

    def is_config(self, config_path: str) -> bool:
        if config_path.removesuffix(".yaml") in self._nodes:
            return True
        group = config_path.rpartition("/")[0]
        return (self._is_ours or (group != "" and self._is_seen(group))) and os.path.isfile(self._file(config_path))

    def is_group(self, config_path: str) -> bool:
        if any(path.startswith(f"{config_path}/") for path in self._nodes):
            return True
        return self._is_seen(config_path) and os.path.isdir(os.path.join(self.path, config_path))

    def _is_seen(self, group: str) -> bool:
        from sweeps.compose.places import GROUPS

        return self._is_ours or group in ("", *GROUPS)

    def list(self, config_path: str, results_filter: ObjectType | None) -> Names:
        from harness.config import ConfigError

        prefix = f"{config_path}/" if config_path else ""
        names = [f"{path.removeprefix(prefix)}.yaml" for path in self._nodes if path.startswith(prefix)]
        try:
            names += os.listdir(os.path.join(self.path, config_path))
        except OSError as error:
            if not names:
                reason = f"{error.strerror}; allowed: a folder that can be read"
                raise ConfigError(f"{Path(self.path, config_path)}: {reason}") from None
        files = {name.removesuffix(".yaml") for name in names if name.endswith(".yaml")}
        of_files = {name for name in files if self.is_config(f"{config_path}/{name}")}
        of_groups = {name for name in names if self.is_group(os.path.join(config_path, name))} - {"__pycache__"}
        by_type = {ObjectType.CONFIG: of_files, ObjectType.GROUP: of_groups}
        return sorted(of_files | of_groups if results_filter is None else by_type[results_filter])


class GridSweeper(Sweeper):
    """Expands the grid of a study and the command line, without composing any job, or searches instead."""

    def __init__(
        self,
        params: DictConfig | None = None,
        grids: DictConfig | None = None,
        conditions: DictConfig | None = None,
        sizes: DictConfig | None = None,  # words of the command line by now: sweeps/compose/arguments.py
    ):
        self.params: dict[str, Any] = {str(key): value for key, value in (params or {}).items()}
        self.grids: dict[str, Any] = {str(name): grid for name, grid in (grids or {}).items()}
        self.conditions: dict[str, Any] = {str(name): axes for name, axes in (conditions or {}).items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.kind = hydra_context.config_loader, config.search.kind
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Ends the process with the sweep's exit status, of which Hydra knows nothing, if that is not 0."""
        from harness.config import ConfigError
        from sweeps.compose.arguments import axes_of, expand
        from sweeps.compose.hydra_calls import current

        assert isinstance(self.launcher, PackLauncher)
        if self.kind != "none" and (self.grids or self.conditions):
            several = "grids" if self.grids else "conditions"
            reason = f"the study has several {several}; allowed: search=none, or another study"
            raise ConfigError(f"search={self.kind}: {reason}")
        if (more := current().more) is not None:
            status = self.launcher.go_on(more)
        elif self.kind != "none":
            status = self.launcher.search(axes_of(self.params, arguments, self.loader))
        else:
            status = self.launcher.train(expand(self.params, arguments, self.loader, self.grids, self.conditions))
        if status:
            raise SystemExit(status)


class PackLauncher(Launcher):
    """Composes the jobs, plans packs and runs them. Its subclasses say where."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from harness.basics.terminal import Terminal
        from sweeps.compose.hydra_calls import current

        self.loader, self.config = hydra_context.config_loader, config
        self.console = current().console or Terminal()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """What other sweepers than ours would call: jobs are no use to us one by one."""
        raise NotImplementedError

    def train(self, job_overrides: Sequence[Sequence[str]]) -> int:
        """Train the grid. Returns the exit status."""
        from sweeps.running.launch import run_grid

        composer, run, executor, trials = self._checked(lambda composer: composer.trials(job_overrides))
        notices = composer.notices(trials, run.idle)
        return run_grid(trials, composer.last_bit(), run, executor, self.console, notices)

    def go_on(self, more: Any) -> int:
        """Train what a `sweeps.running.launch.Begun` has. Returns the exit status."""
        from sweeps.running.launch import run_sweep

        _, run, executor, _ = self._checked(lambda composer: None)
        return run_sweep(more.trials, run, executor, self.console, more.notes, more=more)

    def search(self, axes: Sequence[Any]) -> int:
        """Ask Optuna, instead of training a grid."""
        from sweeps.search.rounds import run_search

        composer, run, executor, _ = self._checked(lambda composer: None)
        return run_search(axes, composer, run, executor, self.console)

    def _checked(self, trials: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
        """The composer, the run, what runs its packs, and what `trials` makes of the composer. Raises ConfigError."""
        from harness.config import Problems
        from sweeps.compose.grid import Composer
        from sweeps.compose.settings import run_from

        study = self.config.hydra.runtime.choices.study
        asked = frozenset(text.partition("=")[0] for text in self.config.hydra.overrides.task)
        problems = Problems()
        with problems.collect():
            composer = Composer(self.loader, study, asked)
            made = trials(composer)
        with problems.collect():
            run = run_from(study, OmegaConf.to_container(self.config))  # type: ignore[arg-type]
            executor = self.executor(run)
        problems.check()
        return composer, run, executor, made

    def executor(self, run: Any) -> Any:
        """What runs the packs."""
        raise NotImplementedError


class LocalLauncher(PackLauncher):
    """On this machine."""

    def __init__(self, workers: Any = "auto"):
        self.workers = workers

    def executor(self, run: Any) -> Any:
        import torch

        from harness.config import ConfigError
        from harness.model.precision import pick_device
        from sweeps.running.local import LocalExecutor, available_cores

        workers = self.workers
        if workers == "auto":
            # A plan may be for a machine that is not here, with one GPU for all that is known.
            is_cuda = (run.plan and run.device == "cuda") or pick_device(run.device).type == "cuda"
            workers = max(1, torch.cuda.device_count()) if is_cuda else available_cores()
        if type(workers) is not int or workers < 1:
            reason = "not a number of processes; allowed: auto, or an integer from 1 up"
            raise ConfigError(f"hydra.launcher.workers={workers}: {reason}")
        return LocalExecutor(workers)


class SlurmLauncher(PackLauncher):
    """On Slurm, as array jobs."""

    def __init__(self, **options: Any):
        self.options = options

    def executor(self, run: Any) -> Any:
        from harness.config import Problems
        from sweeps.slurm.executor import SlurmExecutor

        problems = Problems()
        with problems.collect():
            SlurmExecutor.check_options(self.options)
        with problems.collect():
            SlurmExecutor.check()
        problems.check()
        options = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in self.options.items()}
        executor = SlurmExecutor(options, run.wait)
        if not run.plan:
            executor.check_with_slurm(run.out)
        return executor
