"""Processes that are the ranks of a pack, and wait for what tests have to be done in them; little to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.config import Trial
from harness.testing import engine
from harness.training.distributed import RankGroup, ReplicasDiffer
from harness.training.sites import Site

CPU = torch.device("cpu")


class Processes:
    """A group whose other ranks wait for what they are to do."""

    def __init__(self, group: RankGroup):
        self.group = group

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `function(group, *arguments)` in all of them. Returns what it returns in rank 0."""
        self.tell(function, *arguments, **options)
        return function(self.group, *arguments, **options)

    def tell(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Let the other ranks call it."""
        self.group.gather_objects(partial(function, *arguments, **options))

    def end(self) -> None:
        """Let the other ranks go."""
        self.group.gather_objects(None)

    @contextmanager
    def first(self, count: int, folder: Path) -> Iterator[Processes]:
        """The first ranks as a group of their own, which meets in an empty folder; a process is in one at a time."""
        self.tell(serve_first, count, folder)
        with first_of(self.group, count, folder) as group:
            fewer = Processes(group)
            yield fewer
            fewer.end()


@contextmanager
def first_of(group: RankGroup, count: int, folder: Path) -> Iterator[RankGroup]:
    """This rank's place among the first; afterwards all have the `group` again."""
    group.close()
    with closing(RankGroup(group.rank, count, dist.FileStore(str(folder / "first"), count), CPU)) as first:
        yield first
    rejoin(group, folder)


def rejoin(group: RankGroup, folder: Path) -> None:
    """What torch knows of a group is the same for every object of it in a process, so this brings `group` back."""
    RankGroup(group.rank, group.count, dist.FileStore(str(folder / "all"), group.count), CPU)


def serve_first(group: RankGroup, count: int, folder: Path) -> None:
    """What another rank does for `Processes.first`, whether it is among them or not."""
    if group.rank < count:
        with first_of(group, count, folder) as first:
            serve(first)
    else:
        group.close()
        rejoin(group, folder)


def serve(group: RankGroup) -> None:
    """What another rank does: what rank 0 says."""
    while (told := group.gather_objects(None)[0]) is not None:
        told.func(group, *told.args, **told.keywords)


def trained(group: RankGroup, trials: Sequence[Trial], **options: Any) -> engine.Run:
    """A pack whose ranks are the processes of the group."""
    return engine.run(trials, prepare=lambda pack: pack.spread_over(group), **options)


class Corrupted:
    """Changes a weight in the process of one rank alone, which no fault of a trial does."""

    calls, taps, permanent, memory = ((Site.UPDATE, 3),), (), False, {}

    def __init__(self, is_here: bool):
        self.is_here = is_here

    def recall(self, memory: Any) -> None:
        pass

    def visit(self, site_call: Any) -> list[Any]:
        if self.is_here:
            site_call.tensors["head"][1, 2] += 1e-7
        return []


def message_of_differing(group: RankGroup, trials: Sequence[Trial], rank: int) -> str:
    with pytest.raises(ReplicasDiffer) as caught:
        trained(group, trials, injectors={0: Corrupted(group.rank == rank)}, block=4)
    return str(caught.value)


def message_of_records(group: RankGroup, trials: Sequence[Trial]) -> str:
    """A fault that is armed in one process alone."""
    injectors = {} if group.rank else {1: None}
    with pytest.raises(ReplicasDiffer) as caught:
        fault_schedule = {1: engine.injector_of(trials[1])} | injectors
        trained(group, trials, injectors=fault_schedule)
    return str(caught.value)
