"""What decides the bits of a pack beside its configuration."""

from __future__ import annotations

import platform

import torch

from harness.basics.devices import on_cpu
from harness.basics.version import provenance
from harness.kernels.use import version
from harness.model.start import start_digests
from harness.training.pack import Pack
from sweeps.running.calibration import AT_ONCE


def environment_of(pack: Pack, processes: int) -> dict[str, object]:
    """What the store says of a pack; `starts`: the SHA-256 of the files of `model.start`."""
    starts, device = start_digests(pack.planned), pack.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        **provenance(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": name,
        "threads": torch.get_num_threads(),
        **({"processes": processes} if processes > 1 else {}),
        **({"starts": starts} if starts else {}),
        **({} if on_cpu(device) else {AT_ONCE: pack.at_once, "triton": version(device)}),
    }
