"""The batches of the user's loader: what each step saw, so that it can be handed out again."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.config import ConfigError
from harness.user_loop.inputs import NotRepeated, not_repeated
from harness.user_loop.named_tensors import raw_bytes, tensors_in
from harness.user_loop.streams import Streams, same_streams, set_streams, streams

MOST_BYTES = 2**30  # of batches that are kept
END = object()


@dataclass
class Fetched:
    """A batch as it came, and what the random streams were afterwards, if fetching it drew from them."""

    batch: Any
    after: Streams | None
    digest: int
    bytes: int


@dataclass
class OpenedLoader:
    """A loader that the loop has begun to go through, with the random streams before that and, if it drew, after it.

    `start` is the position of its first batch and which of that position's batches it is; None until it is read.
    """

    loader: Iterable[Any]
    before: Streams
    after: Streams | None
    start: tuple[int, int] | None = None


class BatchBuffer:
    """The batches at hand by position: the position of a batch is the step for which it was planned.

    A step has several batches where gradients are accumulated over passes of the loop. Positions before `keeps` are
    forgotten; None: nothing is kept. With `checks`, what is read once more has to be what it was. Raises NotRepeated
    where it is not, and ConfigError where more than 1 GiB has to be kept.
    """

    def __init__(self) -> None:
        self.keeps: int | None = None
        self.keeps_all = False
        self.checks = False
        self.passes = 1  # of the last step: so many batches belong to a position that is passed over
        self.opened: list[OpenedLoader] = []
        self._kept: dict[int, list[Fetched]] = {}
        self._digests: dict[tuple[int, int], int] = {}  # of those that were handed out, if they are checked
        self._source: Iterator[Any] = iter(())
        self._reads = 0  # number of the loader that the source goes through
        self._front = -1  # the position up to which the source was read
        self._bytes = 0

    def start_at(self, position: int) -> None:
        """The next batch is that of this position, because the run was resumed there."""
        self._front = position - 1

    def open(self, loader: Iterable[Any]) -> None:
        """Read from another loader from here on."""
        before = streams()
        self._source, self._reads = iter(loader), len(self.opened)
        after = streams()
        self.opened.append(OpenedLoader(loader, before, None if same_streams(before, after) else after))

    def open_again(self, number: int, loader: Iterable[Any] | None = None) -> None:
        """Go through a loader once more, of which the loop gives another copy; what is kept of it is handed out.

        The random streams are as when it was opened the first time.
        """
        opened = self.opened[number]
        if number <= self._reads and self.keeps is not None:
            if opened.after is not None:
                set_streams(opened.after)
            return
        self._source, self._reads = iter(opened.loader if loader is None else loader), number
        if opened.start is not None:
            self._front = max(self._front, opened.start[0] - 1)

    def is_beyond(self, number: int, position: int, place: int) -> bool:
        """Whether a batch is one of a later loader than this, as far as they were read."""
        later = self.opened[number + 1].start if number + 1 < len(self.opened) else None
        return later is not None and (position, place) >= later

    @property
    def can_begin_anew(self) -> bool:
        """Whether every batch can be handed out once more."""
        return self.checks or self.keeps_all

    def begin_anew(self, is_given: bool) -> None:
        """From the first batch of the first loader, which the loop gives once more if `is_given`, or kept ones."""
        if self.checks and self.opened:
            self._kept.clear()
            self._bytes, self._front, self._reads = 0, -1, -1
        if self.opened and not is_given:
            self.open_again(0)

    def get(self, position: int, number: int) -> Any:
        """Batch `number` of those of a position; END where the loader has no more."""
        of_step = self._kept.get(position, [])
        if number < len(of_step):
            there = of_step[number]
            if there.after is not None:
                set_streams(there.after)
            return changed(there.batch, torch.clone)
        if position < self._front:
            raise NotRepeated(not_repeated(f"the number of passes of step {position}"))
        while self._front < position - 1:  # read over
            for _ in range(self.passes):
                if (passed := self._fetch(self._front + 1, 0)) is None:
                    return END
                self._keep(self._front + 1, passed)
            self._front += 1
        if (fetched := self._fetch(position, number)) is None:
            return END
        self._front = position
        self._check(position, number, fetched)
        if self.keeps is None:
            return fetched.batch
        self._keep(position, fetched)
        return changed(fetched.batch, torch.clone)

    def _fetch(self, position: int, number: int) -> Fetched | None:
        before = streams() if self.keeps is not None else None
        if (batch := next(self._source, END)) is END:
            return None
        opened = self.opened[self._reads]
        if opened.start is None:
            opened.start = position, number
        digest = digest_of(batch) if self.checks else 0
        if before is None:
            return Fetched(batch, None, digest, 0)
        after, size = streams(), sum(x.nbytes for x in tensors_in(batch))
        return Fetched(batch, None if same_streams(before, after) else after, digest, size)

    def _check(self, position: int, number: int, fetched: Fetched) -> None:
        if self.checks and self._digests.setdefault((position, number), fetched.digest) != fetched.digest:
            why = "is another one when the loader is gone through again, or the loop has changed it in place"
            allowed = "a loader that gives the same batches under the same random seeds, or twin=False"
            raise NotRepeated(f"the batch of step {position} {why}; allowed: {allowed}")

    def _keep(self, position: int, fetched: Fetched) -> None:
        self._kept.setdefault(position, []).append(fetched)
        self._bytes += fetched.bytes
        if self._bytes > MOST_BYTES:
            why = f"{self._bytes} bytes of batches would have to be kept to go back to step {min(self._kept)}"
            allowed = f"{MOST_BYTES}, so fewer or nearer snapshots, or a loader that can be gone through twice"
            raise ConfigError(f"loader: {why}; allowed: {allowed}")

    def forget(self, before: int) -> None:
        """Positions before this one are not read any more."""
        for position in [position for position in self._kept if position < before]:
            self._bytes -= sum(fetched.bytes for fetched in self._kept.pop(position))


def changed(values: Any, change: Any) -> Any:
    """Nested sequences and mappings of the same kinds, with `change` of each tensor in them."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, Mapping):
        made = copy.copy(values)
        for key, value in values.items():
            made[key] = changed(value, change)  # type: ignore[index]
        return made
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(changed(value, change) for value in values))
    if isinstance(values, tuple | list):
        return type(values)(changed(value, change) for value in values)
    return values


def digest_of(batch: Any) -> int:
    """A checksum of the tensors of a batch; of one without any, of what it shows as text."""
    total, is_empty = 0, True
    for values in tensors_in(batch):
        total, is_empty = zlib.crc32(raw_bytes(values), total), False
    return zlib.crc32(repr(batch).encode()) if is_empty else total
