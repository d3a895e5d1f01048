"""Where a run is trained: versions, device and processes, which decide its bits beside its configuration."""

from __future__ import annotations

import platform
from typing import Any

import torch

from harness.basics.cpu_kernels import KERNELS, current_kernels, this_cpu
from harness.basics.devices import on_cpu
from harness.basics.version import provenance


def environment_of(device: torch.device, processes: int) -> dict[str, Any]:
    """As a store keeps it. `processes` is the number of data-parallel ones, kept where there are several."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else this_cpu().model
    return {
        **provenance(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": name,
        **({KERNELS: current_kernels()} if on_cpu(device) else {}),
        "threads": torch.get_num_threads(),
        **({"processes": processes} if processes > 1 else {}),
    }
