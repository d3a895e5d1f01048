"""The classes that Hydra insists on finding in this folder; the work is in sweeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class GridSweeper(Sweeper):
    """Expands the grid of a study and the command line, without composing any job."""

    def __init__(self, params: DictConfig | None = None):
        self.params: dict[str, Any] = {str(key): value for key, value in (params or {}).items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from sweeps.arguments import expand

        assert self.launcher is not None
        return self.launcher.launch(expand(self.params, arguments, self.loader), initial_job_idx=0)


class PackLauncher(Launcher):
    """Composes the jobs, plans packs and runs them. Its subclasses say where."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from rich.console import Console

        from harness.config import Problems
        from sweeps.grid import Composer
        from sweeps.launch import run_rounds
        from sweeps.settings import run_from

        study = self.config.hydra.runtime.choices.study
        asked = frozenset(text.partition("=")[0] for text in self.config.hydra.overrides.task)
        problems = Problems()
        with problems.collect():
            composer = Composer(self.loader, study, asked)
            trials = composer.trials(job_overrides)
        with problems.collect():
            run = run_from(study, OmegaConf.to_container(self.config))  # type: ignore[arg-type]
            executor = self.executor(run)
        problems.check()
        console = Console(markup=False, highlight=False)
        sys.exit(run_rounds(trials, composer.last_bit(), run, executor, console, composer.notices()))

    def executor(self, run: Any) -> Any:
        """What runs the packs."""
        raise NotImplementedError


class LocalLauncher(PackLauncher):
    """On this machine."""

    def __init__(self, workers: Any = "auto"):
        self.workers = workers

    def executor(self, run: Any) -> Any:
        from harness.config import ConfigError
        from harness.precision import pick_device
        from sweeps.local import LocalExecutor, available_cores

        workers = self.workers
        if workers == "auto":
            workers = 1 if pick_device(run.device).type == "cuda" else available_cores()
        if type(workers) is not int or workers < 1:
            reason = "not a number of processes; allowed: auto, or an integer from 1 up"
            raise ConfigError(f"hydra.launcher.workers={workers}: {reason}")
        return LocalExecutor(workers)


class SlurmLauncher(PackLauncher):
    """On Slurm, as array jobs."""

    def __init__(self, **options: Any):
        self.options = options

    def executor(self, run: Any) -> Any:
        from harness.config import ConfigError, Problems
        from sweeps.slurm import SlurmExecutor

        problems = Problems()
        for name, least in {
            "time": 1,
            "cpus": 1,
            "parallel": 1,
            "minutes_per_job": 0,
            "warning": 1,
            "requeues": 0,
        }.items():
            with problems.collect():
                if self.options[name] < least:
                    raise ConfigError(f"hydra.launcher.{name}={self.options[name]}: out of range; allowed: >= {least}")
        with problems.collect():
            SlurmExecutor.check()
        problems.check()
        options = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in self.options.items()}
        return SlurmExecutor(options, run.wait)
