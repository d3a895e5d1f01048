"""The kernels of a run's matrix products on a CPU: chosen before anything is trained, and compared with the store's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from harness.basics.cpu_kernels import AS_IS, KERNELS, cpu_kernels
from harness.storage.pack_info import PackInfo
from sweeps.compose.settings import RunSettings


def with_kernels(run: RunSettings) -> tuple[RunSettings, str]:
    """The run with one choice for this process and all its workers, and why it is so.

    Raises ConfigError for `cpu.kernels` that cannot be had here.
    """
    chosen = cpu_kernels(run.cpu.kernels)
    return replace(run, cpu=replace(run.cpu, kernels=chosen.name)), f"cpu.kernels: {chosen.name}: {chosen.why}"


def kernel_notes(run: RunSettings, packs: Iterable[PackInfo]) -> Iterator[str]:
    """A line on complete packs that were trained on a CPU with other kernels than those of `with_kernels`."""
    environments = [pack.attributes["environment"] for pack in packs if pack.complete]
    on_cpus = [environment for environment in environments if str(environment.get("device", "")).startswith("cpu")]
    if others := {str(environment.get(KERNELS, AS_IS)) for environment in on_cpus} - {run.cpu.kernels}:
        theirs = f"packs that are complete were trained with {', '.join(sorted(others))}"
        yield f"cpu.kernels: this run trains with {run.cpu.kernels}, and {theirs}: between them bits may differ"
