"""The sweep runner: expand the grid, plan packs, launch them here or on Slurm.

From Python, such as in a notebook: `sweeps.run(["optim.lr=1e-3,1e-2"], out="results/mine")`; see sweeps/notebook.py.
"""

from sweeps import current_folder

if current_folder.is_run_by_name(__name__):
    current_folder.leave()  # before anything else is imported

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.config import ConfigError
    from sweeps.notebook import SweepFailed, run

__all__ = ["ConfigError", "SweepFailed", "run"]


class _Package(ModuleType):
    """Loads what is public when it is asked for: `import sweeps` takes no time.

    `run` is a function here, and the module `sweeps.run` is imported from all the same.
    """

    @property
    def run(self) -> Any:
        from sweeps.notebook import run

        return run

    @run.setter
    def run(self, module: ModuleType) -> None:
        """Where Python leaves the module of that name once it is loaded."""

    def __getattr__(self, name: str) -> Any:
        if name == "SweepFailed":
            from sweeps.notebook import SweepFailed

            return SweepFailed
        if name == "ConfigError":
            from harness.config import ConfigError

            return ConfigError
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
