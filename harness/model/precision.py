"""Number formats: of the state (weights, moments, loss), of the matrix products, of norms and of the softmax.

Half precision is that of torch.autocast: what matrix products read and leave is held in bf16 or fp16, and so are its
gradients; weights, residual stream and loss are float32, and norms and softmax too unless the configuration says
otherwise. On CUDA such values are cast. A CPU is some 30 times slower at products in half precision, so there they are
float32 that is rounded to the format wherever the cast value would stand: products of rounded numbers, summed in
float32 and rounded once, as tensor cores have them.

tf32 is fp32 in which matrix products read their factors to 10 bits of mantissa, those of the backward pass too, and sum
in float32 (`harness.model.products`). Everything else is IEEE's float32, as all of fp32 is. CUDA devices from compute
capability 8.0 on have it; a CPU rounds the factors.

fp8 is bf16 in which linear layers, the head among them, round the bf16 numbers that they read to 8 bits: to e4m3 in the
forward pass, and to e5m2 the gradient that arrives in the backward pass (Micikevicius et al. 2022, arXiv 2209.05433).
Each operand of each trial is scaled by its own largest element (`harness.model.formats.round_scaled`): the current
scaling of NVIDIA's Transformer Engine, with its option of scales that are powers of two, so that scaling itself rounds
nothing. Matrices that the model reads as one, as those of query, key and value, share a scale. With
`model.smooth_swiglu` the product of SwiGLU's two branches has a scale for each channel. The backward pass uses
the operands as the forward pass has rounded them. Products of such numbers are exact in float32; what a layer leaves is
bf16 again, as are the products inside attention. Every device emulates it: 8-bit numbers in the type of the products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.basics.devices import on_cpu
from harness.config import ConfigError, Train, Trial
from harness.model.formats import round_scaled, round_to

FORMATS: dict[str, tuple[torch.dtype, torch.dtype]] = {
    # precision: (state, matrix products where they are real)
    "fp32": (torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "fp8": (torch.float32, torch.bfloat16),
    "fp64": (torch.float64, torch.float64),
}


@dataclass(frozen=True)
class Precision:
    """The type of the tensors in matrix products, and the narrower format that their values are rounded to, if any.

    `fp8`: operands of linear layers have 8 bits. `norms`, `softmax`: norms and attention's softmax are held in the
    format of the products too, and not in the state's. `tf32`: products read their factors so.
    """

    products: torch.dtype
    rounds: str | None = None
    fp8: bool = False
    norms: bool = False
    softmax: bool = False
    tf32: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """`x` as a matrix product reads or leaves it. Its gradient arrives in the same format.

        Rounding casts there and back, and so does its backward pass with the gradient.
        """
        if self.rounds is None:
            return x if x.dtype == self.products else x.to(self.products)
        return round_to(x, self.rounds)

    def operand(self, x_Rxxx: Tensor, by_channel: bool = False) -> Tensor:
        """`x`, an input or a weight, as a linear layer reads it in its forward pass; without a gradient.

        `by_channel`: see `round_scaled`.
        """
        return round_scaled(self(x_Rxxx), "fp8_e4m3", by_channel) if self.fp8 else self(x_Rxxx)

    def gradient(self, dy_Rxxx: Tensor) -> Tensor:
        """The gradient of a linear layer's output, as its backward pass reads it."""
        return round_scaled(self(dy_Rxxx), "fp8_e5m2") if self.fp8 else self(dy_Rxxx)

    def norm(self, x: Tensor) -> Tensor:
        """`x`, an activation or a gain, as a norm reads or leaves it. Its gradient arrives in the same format.

        In between, mean and variance are taken in float32, as kernels for half precision do.
        """
        return self(x) if self.norms else x


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of formats that nothing is held in: there is no narrower one, or nothing to add up."""
    train = trial.train
    state, products = FORMATS[train.precision]
    for name in ("norms", "softmax"):
        if getattr(train, name) == "products" and products.itemsize >= state.itemsize:
            why = f"train.precision={train.precision} has no narrower format"
            yield f"train.{name}", f"train.{name}=products: {why}"
    for name, usual in (("accumulation", "fp32"), ("reduction", "sequential")):
        if train.ranks == 1 and (value := getattr(train, name)) != usual:
            yield f"train.{name}", f"train.{name}={value}: with train.ranks=1 there is nothing to add up"


def precision_of(train: Train, device: torch.device) -> Precision:
    """What `train.precision`, with `train.norms` and `train.softmax`, means on this device.

    In full precision, where there is no narrower format, the two choices of norms and softmax are the same bits.
    """
    state, products = FORMATS[train.precision]
    is_half = products.itemsize < state.itemsize
    is_fp8, rounds = train.precision == "fp8", None
    if is_half and on_cpu(device):
        products, rounds = state, "bf16" if is_fp8 else train.precision
    norms, softmax = (is_half and format == "products" for format in (train.norms, train.softmax))
    return Precision(products, rounds, is_fp8, norms, softmax, train.precision == "tf32")


def pick_device(name: str, precision: str = "fp32") -> torch.device:
    """The device that `device=name` means; `auto` is the accelerator if there is one.

    Raises ConfigError for a device that this machine lacks, or that lacks the precision.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name}: unknown; allowed: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch finds no CUDA device on this machine; allowed: auto, cpu")
    device = torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
    needs_bf16 = FORMATS[precision][1] == torch.bfloat16
    if needs_bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"train.precision={precision}: this CUDA device lacks bf16 (device={name}); "
            f"allowed: fp32, fp16, fp64, or device=cpu"
        )
    if precision == "tf32" and device.type == "cuda":
        _check_tf32(name)
    return device


def _check_tf32(name: str) -> None:
    """Raises ConfigError for a GPU whose products of float32 would silently be in full precision."""
    if torch.version.hip is not None:
        lacking = "this GPU is not NVIDIA's"
    elif (version := torch.cuda.get_device_capability()) < (8, 0):
        lacking = f"this CUDA device has compute capability {version[0]}.{version[1]}, and TF32 begins at 8.0"
    else:
        return
    raise ConfigError(f"train.precision=tf32: {lacking} (device={name}); allowed: fp32, fp16, fp64, or device=cpu")
