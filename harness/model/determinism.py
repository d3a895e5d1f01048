"""What torch is told so that a pack gives the same bits every time, and float32 means IEEE's.

torch has two ways to say how float32 is multiplied: `fp32_precision` and the older `allow_tf32`, which no longer can be
read, and ends compilers that read it, where both have been used. Here it is `fp32_precision` alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from harness.basics.devices import on_cpu

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Setting:
    """Something that is set for all of torch in a process: how to read and write it, and what a pack needs.

    What a CPU's kernels ask for, too, is set on every device, and the rest on others alone.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    needed: Callable[[], Any]
    on_cpus: bool = False

    def put(self, value: Any) -> None:
        """Write it, unless it is so already: some take half a second."""
        if self.read() != value:
            self.write(value)


def _strict() -> Setting:
    """An operation without a deterministic kernel raises. With a warning alone fused attention would have none."""

    def read() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def write(value: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])

    return Setting("use_deterministic_algorithms", read, write, lambda: (True, False))


def _workspace() -> Setting:
    """Memory for cuBLAS whose size is fixed, unless somebody has said another."""

    def write(value: str | None) -> None:
        if value is None:
            del os.environ[WORKSPACE]
        else:
            os.environ[WORKSPACE] = value

    return Setting(WORKSPACE, lambda: os.environ.get(WORKSPACE), write, lambda: os.environ.get(WORKSPACE, ":4096:8"))


def _attribute(path: str, needed: Any, on_cpus: bool = False) -> Setting:
    """An attribute of something in torch."""
    owner, name = path.rsplit(".", 1)
    found = attrgetter(owner)(torch)
    return Setting(
        path, lambda: getattr(found, name), lambda value: setattr(found, name, value), lambda: needed, on_cpus
    )


def _float32(backend: str, on_cpus: bool = False) -> Setting:
    """How a backend takes float32. Where it is `none`, it is as a wider one has it, `torch.backends` above all."""
    whole = _attribute(f"{backend}.fp32_precision", "ieee", on_cpus)

    def write(value: str) -> None:
        whole.write("none")
        whole.put(value)

    return replace(whole, write=write)


def _half_sums(name: str) -> Setting:
    """Whether half-precision products may add up in half precision, and whether in several parts (split-K).

    Partial sums stay float32, as on a CPU: in fp16 they could overflow where the result does not. Parts are added in a
    fixed order, but how many there are is up to the library, which may go by the number of trials. Only cuBLASLt can be
    told to make none (TORCH_BLAS_PREFER_CUBLASLT=1): with cuBLAS, torch would then refuse some products.
    """
    matmul = torch.backends.cuda.matmul

    def read() -> tuple[bool, bool]:
        return getattr(matmul, name), getattr(matmul, f"{name}_split_k")

    def needed() -> tuple[bool, bool]:
        return False, str(torch.backends.cuda.preferred_blas_library()) != "_BlasBackend.Cublaslt"

    return Setting(f"backends.cuda.matmul.{name}", read, lambda value: setattr(matmul, name, value), needed)


SETTINGS = (
    _strict(),
    _workspace(),
    _attribute("utils.deterministic.fill_uninitialized_memory", False, on_cpus=True),  # else `empty` costs a pass
    _attribute("backends.fp32_precision", "ieee", on_cpus=True),  # wider ones before narrower ones
    *(_float32(f"backends.mkldnn.{name}", on_cpus=True) for name in ("matmul", "conv", "rnn")),
    *(_float32(f"backends.{name}") for name in ("cudnn", "cudnn.conv", "cudnn.rnn", "cuda.matmul")),
    _attribute("backends.cudnn.benchmark", False),
    _attribute("backends.cuda.matmul.allow_fp16_accumulation", False),
    _half_sums("allow_fp16_reduced_precision_reduction"),
    _half_sums("allow_bf16_reduced_precision_reduction"),
    Setting(  # its backward pass is not deterministic
        "cudnn_sdp", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, lambda: False
    ),
    Setting(
        "fp16_bf16_reduction_math_sdp",
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        lambda: False,
    ),
)


def make_deterministic(device: torch.device) -> None:
    """Ask for kernels that give the same bits every time, and for float32 that is IEEE's.

    An operation that has no such kernel on the device raises RuntimeError. A CPU's all are, and there only what
    concerns its kernels is set.
    """
    for setting in SETTINGS:
        if setting.on_cpus or not on_cpu(device):
            setting.put(setting.needed())


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Whatever `make_deterministic` sets meanwhile is afterwards as it was before."""
    before = [(setting, setting.read()) for setting in SETTINGS]
    try:
        yield
    finally:
        for setting, value in before:
            setting.put(value)
