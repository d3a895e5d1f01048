"""The kernels of a run's matrix products on a CPU: chosen before anything is trained, and compared with the store's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.basics.cpu_kernels import AS_IS, KERNELS, cpu_kernels
from harness.storage.pack_info import PackInfo
from sweeps.compose.settings import RunSettings


def kernel_notes(run: RunSettings, packs: Iterable[PackInfo], is_verbose: bool) -> Iterator[str]:
    """Lines on what this machine trains with, and on complete packs that were trained on a CPU with other kernels.

    Raises ConfigError for `cpu.kernels` that cannot be had here.
    """
    chosen = cpu_kernels(run.cpu.kernels)
    if is_verbose:
        yield f"cpu.kernels: {chosen.name}: {chosen.why}"
    environments = [pack.attributes["environment"] for pack in packs if pack.complete]
    on_cpus = [environment for environment in environments if str(environment.get("device", "")).startswith("cpu")]
    if others := {str(environment.get(KERNELS, AS_IS)) for environment in on_cpus} - {chosen.name}:
        theirs = ", ".join(sorted(others))
        yield (
            f"cpu.kernels: this run trains with {chosen.name}, and packs that are complete were trained with {theirs}: "
            "between them bits may differ"
        )
