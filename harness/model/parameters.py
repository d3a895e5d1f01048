"""The weights of a pack, flat: one [R, P] array, trial first, with a named view for each tensor.

Flat, because clipping, the optimizer, norms, snapshots, forks and bit flips are then a line each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby

import torch
from torch import Tensor

from harness.config import Trial
from harness.model.products import CACHE_LINE
from harness.model.tensors import ScaledTensor

ALIGNMENT = CACHE_LINE // 4  # elements, of at least four bytes each: see harness/model/products.py
SMALL_DRAW = 4096  # elements; the 2048 draws that are kept take 32 MiB at most


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Segment:
    """Neighbouring columns of the flat array that share their multipliers."""

    start: int
    stop: int
    learning_rate: float
    decay: float
    epsilon: float


@dataclass(frozen=True)
class Layout:
    """Where each tensor stands in the flat array."""

    tensors: tuple[ScaledTensor, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        offsets, end = {}, 0
        for scaled in self.tensors:
            start = end if scaled.stacked else _aligned(end)
            offsets[scaled.name], end = start, start + scaled.size
        return offsets

    @cached_property
    def by_name(self) -> dict[str, ScaledTensor]:
        return {scaled.name: scaled for scaled in self.tensors}

    @cached_property
    def size(self) -> int:
        """P: all elements of one trial, with the padding between tensors (which is zero and stays zero)."""
        last = self.tensors[-1]
        return _aligned(self.offsets[last.name] + last.size)

    @cached_property
    def elements(self) -> int:
        """The parameters of one trial, without the padding."""
        return sum(scaled.size for scaled in self.tensors)

    @cached_property
    def spans(self) -> tuple[Segment, ...]:
        """Each tensor's columns on their own, without the padding, in the order of `tensors`."""
        starts = (self.offsets[scaled.name] for scaled in self.tensors)
        return tuple(
            Segment(start, start + scaled.size, scaled.learning_rate, scaled.decay, scaled.epsilon)
            for start, scaled in zip(starts, self.tensors, strict=True)
        )

    @cached_property
    def padding(self) -> Tensor:
        """The columns that stand between tensors and belong to none, int64, in main memory."""
        free = torch.ones(self.size, dtype=torch.bool)
        for span in self.spans:
            free[span.start : span.stop] = False
        return free.nonzero().flatten()

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All columns, in as few pieces as share their multipliers."""
        alike = groupby(self.spans, key=lambda span: (span.learning_rate, span.decay, span.epsilon))
        firsts = [next(spans) for _, spans in alike]
        ends = [*(span.start for span in firsts[1:]), self.size]
        return tuple(replace(span, stop=stop) for span, stop in zip(firsts, ends, strict=True))

    def view(self, flat: Tensor, first: str, last: str | None = None) -> Tensor:
        """The tensor `first` of every trial, [R, *shape]; up to `last`: their matrices stacked along dim 1.

        `flat` is any [R, P] array: weights, gradients, a moment.
        """
        scaled, end = self.by_name[first], self.by_name[last or first]
        start, stop = self.offsets[first], self.offsets[end.name] + end.size
        shape = (-1, *scaled.shape[1:]) if last else scaled.shape
        return flat[:, start:stop].view(flat.shape[0], *shape)


@dataclass(frozen=True)
class Views(Mapping[str, Tensor]):
    """One trial's tensors by name, each made when it is asked for; `flats` are arrays [1, P] by what precedes names."""

    layout: Layout
    flats: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        start, colon, tensor = name.rpartition(":")
        return self.layout.view(self.flats[start + colon], tensor)[0]

    def __iter__(self) -> Iterator[str]:
        return (prefix + name for prefix in self.flats for name in self.layout.by_name)

    def __len__(self) -> int:
        return len(self.flats) * len(self.layout.by_name)


def new_weights(layout: Layout, trials: Sequence[Trial], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Initial weights [R, P]: normal with the table's mean and std, cut at two standard deviations where it says so.

    A tensor's values depend on (the seed or field of the trial, its name, its shape) alone: not on the pack, the device
    or other tensors. Where a trial names a file (`model.start`), they are what that holds. Raises ConfigError for files
    of other tensors.
    """
    if device.type == "meta":  # tensors without numbers
        return torch.zeros(len(trials), layout.size, dtype=dtype, device=device)
    flat = torch.zeros(len(trials), layout.size)
    seeds = [trial.seeds["init"] for trial in trials]
    for scaled in layout.tensors:
        view = layout.view(flat, scaled.name)
        if scaled.std == 0:
            means = [scaled.mean if scaled.field is None else getattr(trial.model, scaled.field) for trial in trials]
            view.copy_(torch.tensor(means).view(-1, *[1] * len(scaled.shape)))
            continue
        drawn: dict[int, int] = {}  # the row that has a seed's values: learning rates are often compared on equal ones
        for r, seed in enumerate(seeds):
            if drawn.setdefault(seed, r) < r:
                view[r] = view[drawn[seed]]
            elif scaled.size <= SMALL_DRAW:
                view[r] = small_draw(seed, scaled.name, scaled.shape, scaled.is_cut)
            else:
                _draw(view[r], seed, scaled.name, scaled.is_cut)
        view.mul_(scaled.std / TRUNCATED_STD if scaled.is_cut else scaled.std).add_(scaled.mean)
    flat = flat.to(device, dtype)
    if any(trial.model.start is not None for trial in trials):
        _start_from_files(layout, flat, trials)
    return flat


def _start_from_files(layout: Layout, flat: Tensor, trials: Sequence[Trial]) -> None:
    """Put the stored weights of the trials that start with some in the place of drawn ones. Raises ConfigError."""
    from harness.model.start import start_of, stored_start  # which loads what reads files

    starts = [start_of(trial) for trial in trials]
    for given in {start for start in starts if start is not None}:
        tensors = stored_start(given, {scaled.name: scaled.shape for scaled in layout.tensors})
        for name, values in tensors.items():
            layout.view(flat, name)[[start == given for start in starts]] = values.to(flat)


def _draw(values: Tensor, seed: int, name: str, is_cut: bool) -> Tensor:
    """Fill with the standard normal values of a seed and a tensor's name, cut at +-2 or not."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if not is_cut:
        return values.normal_(generator=generator)
    return torch.nn.init.trunc_normal_(values, std=1.0, a=-2.0, b=2.0, generator=generator)


@lru_cache(maxsize=2048)
def small_draw(seed: int, name: str, shape: tuple[int, ...], is_cut: bool) -> Tensor:
    """The same, kept for later packs, which often share seeds: to draw a small tensor costs some steps of training."""
    return _draw(torch.empty(shape), seed, name, is_cut)


TRUNCATED_STD = 0.8796256610342398  # standard deviation of a standard normal cut at +-2
