"""The sweep runner: expand the grid, plan packs, launch them here or on Slurm.

From Python, such as in a notebook: `sweeps.run(["optim.lr=1e-3,1e-2"], out="results/mine")`; see
sweeps/commands/notebook.py.
"""

from sweeps import current_folder

if current_folder.is_run_by_name(__name__):
    current_folder.leave()  # before anything else is imported

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sweeps.commands.notebook import ConfigError, FolderLost, SweepFailed, run

__all__ = ["ConfigError", "FolderLost", "SweepFailed", "run"]


def __getattr__(name: str) -> Any:
    """Loads what is public when it is asked for: `import sweeps` takes no time."""
    if name in __all__:
        from sweeps.commands import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
