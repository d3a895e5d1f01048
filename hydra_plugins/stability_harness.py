"""The classes that Hydra insists on finding in this folder; the work is in sweeps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
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
        from sweeps.grid import expand

        params = [f"{key}={value}" for key, value in self.params.items()]
        assert self.launcher is not None
        return self.launcher.launch(expand(params, arguments, self.loader), initial_job_idx=0)


class PackLauncher(Launcher):
    """Composes the jobs, plans packs and runs them. Its subclasses say where."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from rich.console import Console

        from sweeps.grid import Composer
        from sweeps.launch import run_sweep
        from sweeps.settings import run_from

        study = self.config.hydra.runtime.choices.study
        run = run_from(study, OmegaConf.to_container(self.config))  # type: ignore[arg-type]
        trials = Composer(self.loader, study).trials(job_overrides)
        workers, executor = self.executor(run)
        sys.exit(run_sweep(trials, run, workers, executor, Console()))

    def executor(self, run: Any) -> tuple[int, Any]:
        """How many packs run at once, and what runs them."""
        raise NotImplementedError


class LocalLauncher(PackLauncher):
    """On this machine."""

    def __init__(self, workers: Any = "auto"):
        self.workers = workers

    def executor(self, run: Any) -> tuple[int, Any]:
        from harness.config import ConfigError
        from harness.precision import pick_device
        from sweeps.launch import LocalExecutor, available_cores

        workers = self.workers
        if workers == "auto":
            workers = 1 if pick_device(run.device).type == "cuda" else available_cores()
        if type(workers) is not int or workers < 1:
            raise ConfigError(f"hydra.launcher.workers={workers}: allowed: auto, or an integer from 1 up")
        return workers, LocalExecutor(workers)


class SlurmLauncher(PackLauncher):
    """On Slurm, one array job."""

    def __init__(self, **options: Any):
        self.options = options

    def executor(self, run: Any) -> tuple[int, Any]:
        from sweeps.slurm import SlurmExecutor

        SlurmExecutor.check()
        options = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in self.options.items()}
        return self.options["parallel"], SlurmExecutor(options, run.wait)


def register() -> None:
    """Tell Hydra of the sweeper and the launchers."""
    here = "hydra_plugins.stability_harness"
    store = ConfigStore.instance()
    store.store(group="hydra/sweeper", name="grid", node={"_target_": f"{here}.GridSweeper", "params": {}})
    store.store(group="hydra/launcher", name="local", node={"_target_": f"{here}.LocalLauncher", "workers": "auto"})
    slurm: dict[str, Any] = {
        "partition": None,
        "account": None,
        "qos": None,
        "time": 60,  # minutes
        "cpus": 1,
        "gpus": None,
        "memory": "4GB",
        "constraint": None,
        "extra": {},  # any further sbatch option by its long name: {nice: 100}
        "setup": [],  # shell lines that run in the job before Python
        "parallel": 256,  # jobs of the array that may run at the same time
    }
    store.store(group="hydra/launcher", name="slurm", node={"_target_": f"{here}.SlurmLauncher", **slurm})


register()
