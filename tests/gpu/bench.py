"""What every check is handed: the device, sizes for the day and for a dry run, clocks, and a place for its figures."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotMeasured(Exception):
    """A check, or the rest of it, cannot be measured here; says why."""


@dataclass
class Bench:
    """One check on one device. With `is_dry` everything is tiny, on a CPU, and no figure counts.

    `place` is where its figures are written as they come, for whoever waits for it: a check that is stopped leaves what
    it has. `until` is the end of its time, by `time.monotonic`.
    """

    device: torch.device
    is_dry: bool
    place: Path
    until: float = math.inf
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, usual: T, dry: T) -> T:
        return dry if self.is_dry else usual

    def tell(self, name: str, value: float) -> None:
        """A figure is there."""
        self.figures[name] = float(value)
        self._write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._write()

    def _write(self) -> None:
        new = self.place.with_suffix(".new")
        new.write_text(json.dumps({"figures": self.figures, "notes": self.notes}))
        new.replace(self.place)

    def check_time(self, needed: float) -> None:
        """Raises NotMeasured where so many seconds are not left: what is there is better than to be stopped."""
        if (left := self.until - time.monotonic()) < needed and not self.is_dry:
            raise NotMeasured(f"{left:.0f} s were left, and the rest takes about {needed:.0f} s")

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def now(self) -> float:
        """Seconds, once the device has done all."""
        self.wait()
        return time.perf_counter()

    def seconds(self, function: Callable[[], Any], calls: int) -> float:
        """Of one call, on the device's own clock: the mean of so many in a row, after three that do not count."""
        for _ in range(3):
            function()
        if not self.is_cuda:
            started = self.now()
            for _ in range(calls):
                function()
            return (self.now() - started) / calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.wait()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / 1e3 / calls

    def copy_bandwidth(self) -> float:
        """Bytes a second that a copy on the device reads and writes; of more than any cache holds."""
        source = torch.ones(self.pick(2**28, 2**12), device=self.device)
        target = torch.empty_like(source)
        return 8 * source.numel() / self.seconds(lambda: target.copy_(source), self.pick(30, 2))

    def product_peak(self) -> float:
        """Operations a second of a large matrix product in bf16, of numbers that are not zero."""
        size = self.pick(8192, 32)
        x, y = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: torch.mm(x, y), self.pick(30, 2))

    def peak_memory(self, function: Callable[[], T]) -> tuple[int, T]:
        """Bytes that the device held at most while the function ran, beyond what it held before."""
        if not self.is_cuda:
            return 1, function()
        self.wait()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        found = function()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before, found


def _half_sums(name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Whether products of half precision are summed up in it, and in several parts, where that can be asked."""
    matmul, parts = torch.backends.cuda.matmul, f"{name}_split_k"
    if not hasattr(matmul, parts):
        return partial(getattr, matmul, name), partial(setattr, matmul, name)
    return lambda: (getattr(matmul, name), getattr(matmul, parts)), partial(setattr, matmul, name)


def _strict() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


CUDA = torch.backends.cuda
SETTINGS: Sequence[tuple[Callable[[], Any], Callable[[Any], None]]] = (  # how to read and to write each
    (_strict, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    _half_sums("allow_fp16_reduced_precision_reduction"),
    _half_sums("allow_bf16_reduced_precision_reduction"),
    (CUDA.flash_sdp_enabled, CUDA.enable_flash_sdp),
    (CUDA.mem_efficient_sdp_enabled, CUDA.enable_mem_efficient_sdp),
    (CUDA.math_sdp_enabled, CUDA.enable_math_sdp),
    (CUDA.cudnn_sdp_enabled, CUDA.enable_cudnn_sdp),
    (CUDA.fp16_bf16_reduction_math_sdp_allowed, CUDA.allow_fp16_bf16_reduction_math_sdp),
)
USUAL = [read() for read, _ in SETTINGS]  # when this is loaded, before anything is set


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """torch as it comes, for a peer: without what the harness asks of it for equal bits. float32 stays IEEE's."""
    ours = [read() for read, _ in SETTINGS]
    try:
        for (_, write), value in zip(SETTINGS, USUAL, strict=True):
            write(value)
        yield
    finally:
        for (_, write), value in zip(SETTINGS, ours, strict=True):
            write(value)


def integers(x: Tensor) -> Tensor:
    """The bits, flat: NaN equals itself, and zero differs from minus zero."""
    return x.detach().contiguous().view(-1).view(INTEGERS[x.element_size()])


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, int]:
    """`differing` of each by its name, where there are any."""
    counts = {name: differing({name: x}, {name: other[name]} if name in other else {}) for name, x in one.items()}
    counts |= {name: differing({}, {name: x}) for name, x in other.items() if name not in one}
    return {name: count for name, count in counts.items() if count}


def count_unlike(bench: Bench, what: str, pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> int:
    """How many numbers differ in all these pairs; those that do are noted by name."""
    found: Counter[str] = Counter()
    for one, other in pairs:
        found.update(unlike(one, other))
    if found:
        bench.note(f"{what}: {', '.join(f'{name} {count}' for name, count in sorted(found.items()))}")
    return sum(found.values())


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> int:
    """How many numbers of two sets differ in any bit; any NaN is the same. All that one has alone differ."""
    total = 0
    for name in one.keys() | other.keys():
        if name not in one or name not in other or one[name].shape != other[name].shape:
            total += max(values[name].numel() for values in (one, other) if name in values)
            continue
        x, y = (values[name].detach().cpu() for values in (one, other))
        both = x.isnan() & y.isnan() if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)
        total += int(((integers(x) != integers(y)) & ~both.reshape(-1)).sum())
    return total


def relative(one: Tensor, other: Tensor) -> float:
    """The size of the difference of two sets of numbers over that of the second."""
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    return float((one - other).norm() / other.norm())


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds, of which each has both."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
