"""The training engine: packs of GPTs with the trial as the first axis of every tensor.

For a model and a loop of one's own: `from harness import attach`; see docs/attach.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.basics.cpu_kernels import cpu_kernels
    from harness.user_loop.attach import ConfigError, attach

__all__ = ["ConfigError", "attach", "cpu_kernels"]


def __getattr__(name: str) -> Any:
    """Loads what is public when it is asked for: `import harness` takes no time."""
    if name == "cpu_kernels":
        from harness.basics import cpu_kernels

        return cpu_kernels.cpu_kernels
    if name in __all__:
        from harness.user_loop import attach

        return getattr(attach, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
