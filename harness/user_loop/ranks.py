"""Data-parallel ranks of the user's run, each a process with a copy of the model: they have to decide alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed

from harness.training.sites import Event


class Ranks:
    """The process group that is there when a run is attached; one rank without any."""

    def __init__(self) -> None:
        is_there = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if is_there else 0
        self.size = distributed.get_world_size() if is_there else 1

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean over ranks of each value, the same on all of them; what is not finite anywhere is not finite."""
        if self.size == 1:
            return list(values)
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        joined = torch.tensor(values, dtype=torch.float64, device=device)
        distributed.all_reduce(joined)
        return (joined / self.size).tolist()

    def earliest(self, step: int | None) -> int | None:
        """The first of the steps that any rank has; None: none has one."""
        if self.size == 1:
            return step
        steps: list[int | None] = [None] * self.size
        distributed.all_gather_object(steps, step)
        return min((one for one in steps if one is not None), default=None)

    def total(self, counts: Sequence[int]) -> list[int]:
        """The sum over ranks of each count."""
        return [round(mean * self.size) for mean in self.mean(counts)]

    def all_events(self, events: Sequence[Event]) -> list[Event]:
        """Those of all ranks, by step."""
        if self.size == 1:
            return list(events)
        gathered: list[list[Event]] = [[] for _ in range(self.size)]
        distributed.all_gather_object(gathered, list(events))
        return sorted((event for each in gathered for event in each), key=lambda event: (event.step, event.rank))
