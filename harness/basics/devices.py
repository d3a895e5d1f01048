"""Which way code takes that has one of its own for CPUs: one question, so that tests can ask it otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this folder is loaded where torch is not needed
    import torch
    from torch import Tensor

CPUS: tuple[str, ...] = ("cpu",)  # kinds of devices that are a CPU; a test sets () to take the other ways on a CPU


def on_cpu(where: Tensor | torch.device) -> bool:
    """Whether a tensor or a device is a CPU's: a look at its numbers waits for nothing, and kernels differ there."""
    return getattr(where, "device", where).type in CPUS


def sent(values: Tensor, to: torch.device) -> Tensor:
    """What lies in main memory, on a device; the host goes on meanwhile."""
    return (values.pin_memory() if to.type == "cuda" else values).to(to, non_blocking=True)
