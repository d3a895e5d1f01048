"""The sweep runner: expand the grid, plan packs, launch them here or on Slurm.

From Python, such as in a notebook: `sweeps.run(["optim.lr=1e-3,1e-2"], out="results/mine")`; see
sweeps/commands/notebook.py.
"""

from sweeps import current_folder

if current_folder.is_run_by_name(__name__):
    current_folder.leave()  # before anything else is imported

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.config import ConfigError
    from harness.storage.results_folder import FolderLost
    from sweeps.commands.notebook import SweepFailed, run

__all__ = ["ConfigError", "FolderLost", "SweepFailed", "run"]


def __getattr__(name: str) -> Any:
    """Loads what is public when it is asked for: `import sweeps` takes no time."""
    if name in ("run", "SweepFailed"):
        from sweeps.commands import notebook

        return getattr(notebook, name)
    if name == "ConfigError":
        from harness.config import ConfigError

        return ConfigError
    if name == "FolderLost":
        from harness.storage.results_folder import FolderLost

        return FolderLost
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
