"""Number formats: of the state (weights, moments, loss) and of the matrix products.

Half precision is that of torch.autocast: what matrix products read and leave is held in bf16 or fp16, and so are its
gradients; weights, norms, residual stream, softmax and loss are float32. On CUDA such values are cast. A CPU is some 30
times slower at products in half precision, so there they are float32 that is rounded to the format wherever the cast
value would stand: products of rounded numbers, summed in float32 and rounded once, as tensor cores have them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import ConfigError
from harness.formats import round_to

FORMATS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    # precision: (state, matrix products where they are real)
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "fp64": (torch.float64, torch.float64),
}


@dataclass(frozen=True)
class Precision:
    """The type of the tensors in matrix products, and the narrower format that their values are rounded to, if any."""

    products: torch.dtype
    rounds: str | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` as a matrix product reads or leaves it. Its gradient arrives in the same format.

        Rounding casts there and back, and so does its backward pass with the gradient.
        """
        if self.rounds is None:
            return x if x.dtype == self.products else x.to(self.products)
        return round_to(x, self.rounds)


def precision_of(name: str, device: torch.device) -> Precision:
    """What `train.precision=name` means on this device."""
    state, products = FORMATS[name]
    if products.itemsize < state.itemsize and device.type == "cpu":
        return Precision(state, rounds=name)
    return Precision(products)


def pick_device(name: str, precision: str = "fp32") -> torch.device:
    """The device that `device=name` means; `auto` is the accelerator if there is one.

    Raises ConfigError for a device that this machine lacks, or that lacks the precision.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name}: unknown; allowed: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device on this machine; allowed: auto, cpu")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"train.precision=bf16: this CUDA device lacks it (device={name}); allowed: fp32, fp16, fp64, or device=cpu"
        )
    return device


def make_deterministic(device: torch.device) -> None:
    """Ask for kernels that give the same bits every time; on a CPU they do already."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        matmul = torch.backends.cuda.matmul
        matmul.allow_tf32 = False
        # Partial sums stay float32, as on a CPU: in fp16 they could overflow where the result does not.
        matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
