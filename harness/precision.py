"""Number formats: of the state (weights, moments, loss) and of the matrix products."""

from __future__ import annotations

import os

import torch

from harness.config import ConfigError

FORMATS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    # precision: (state, matrix products). bf16 is what torch.autocast does: float32 weights, products in bfloat16.
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}


def pick_device(name: str, precision: str = "fp32") -> torch.device:
    """The device that `device=name` means; `auto` is the accelerator if there is one.

    Raises ConfigError for a device that this machine lacks, or that lacks the precision.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name}: unknown; allowed: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device on this machine; allowed: auto, cpu")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if precision == "bf16" and device.type == "cpu":
        raise ConfigError(f"train.precision=bf16: needs a CUDA device (device={name}); allowed on a CPU: fp32, fp64")
    return device


def make_deterministic(device: torch.device) -> None:
    """Ask for kernels that give the same bits every time; on a CPU they do already."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = False
