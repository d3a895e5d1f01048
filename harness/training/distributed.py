"""Data-parallel ranks that are processes of their own, for a pack too large or too slow for one device.

Each process has the whole pack, learns from its rank's part of the batch, and hands in its gradients; the mean, and all
that follows from it, is the same bits in every process. What rank 0 knows is therefore what a checkpoint and the store
need, and replicas are compared before either is written.

Gradients that are added in any order go through one all-reduce, which is that of two simulated ranks to the bit, and of
more to rounding. Where the configuration asks for an order or a format they are gathered, and added as simulated ranks
are: the same bits.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.storage.checkpoint import Checkpoints
from harness.training.ranks import Communicator, Replica, T

PATIENCE = datetime.timedelta(minutes=30)  # with another rank that neither answers nor ends
PIECE = 2**24  # elements of each rank that are gathered at a time
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankLost(RuntimeError):
    """Another rank does not answer any more."""


class ReplicasDiffer(RuntimeError):
    """Processes that should have the same state have not: memory or arithmetic of one of them was corrupted."""


class RankGroup:
    """The processes of one pack, one a rank, and what they tell one another. Raises RankLost where one has ended.

    They meet at `store`, a `torch.distributed.Store`. Tensors on GPUs go through NCCL if each rank has a GPU to itself,
    and by way of the CPU and gloo otherwise, as all else does.
    """

    def __init__(self, rank: int, count: int, store: Any, device: torch.device):
        self.rank, self.count, self.device = rank, count, device
        if device.type == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())  # ranks take turns on the GPUs
            torch.cuda.set_device(self.device)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        is_nccl = device.type == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= count
        self.backend = "nccl" if is_nccl else "gloo"  # what carries the tensors
        with _asking():
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=PATIENCE)
            self._tensors = dist.new_group(backend="nccl", timeout=PATIENCE) if is_nccl else None

    def sum(self, x: Tensor) -> None:
        """`x` becomes the sum over all ranks, the same bits in each."""
        wire = self._wire(x)
        with _asking():
            dist.all_reduce(wire, group=self._tensors)
        if wire is not x:
            x.copy_(wire)

    def gather(self, x: Tensor) -> Tensor:
        """What each rank has as `x`, [ranks, *x.shape]."""
        wire = self._wire(x)
        gathered = wire.new_empty(self.count, *wire.shape)
        with _asking():
            dist.all_gather(list(gathered.unbind(0)), wire, group=self._tensors)
        return gathered.to(x.device)

    def gather_objects(self, mine: T) -> list[T]:
        """What each rank has as `mine`: anything that can be pickled."""
        gathered: list[Any] = [None] * self.count
        with _asking():
            dist.all_gather_object(gathered, mine)
        return gathered

    def from_first(self, value: int) -> int:
        """What rank 0 has as `value`. No GPU waits for it."""
        wire = torch.tensor([value])
        with _asking():
            dist.broadcast(wire, src=0)
        return int(wire)

    def abort(self) -> None:
        """Let this process's GPU stop waiting for a rank that has ended; gloo finds that out by itself."""
        if self._tensors is not None:
            self._tensors.abort()

    def close(self) -> None:
        """Leave the group, without waiting for anybody."""
        dist.destroy_process_group()

    def _wire(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.backend == "nccl" or x.device.type == "cpu" else x.cpu().contiguous()


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"no answer from another rank: {error}") from error


class ProcessCommunicator(Communicator):
    """The rank of this process among those of its group, for the loop."""

    def __init__(self, order: str, format: str, group: RankGroup):
        super().__init__(group.count, order, format)
        self.group, self.processes = group, group.count

    def parts(self, batch_RxBxT1: Tensor) -> Iterator[tuple[int, Tensor]]:
        self.current = self.group.rank
        yield self.group.rank, self.part(batch_RxBxT1, self.group.rank)

    def add(self, gradients: Tensor) -> None:
        """They wait in the pack's own array."""

    def finish(self, gradients: Tensor) -> None:
        if (self.order, self.format) == ("sequential", "fp32"):
            self.group.sum(gradients)
            gradients.div_(self.count)
            return
        for piece in gradients.view(-1).split(PIECE):
            mean, parts = Communicator(self.count, self.order, self.format), self.group.gather(piece)
            for rank in self.sequence():
                mean.add(parts[rank])
            mean.finish(piece)

    def mean(self, losses: Sequence[Tensor]) -> Tensor:
        parts = self.group.gather(*losses)
        return super().mean([parts[rank] for rank in self.sequence()])

    def largest(self, values: Tensor) -> Tensor:
        return self.group.gather(values).amax(0)

    def total(self, values: Tensor) -> Tensor:
        return self.group.gather(values).sum(0)

    def of_all(self, mine: Tensor) -> Tensor:
        return self.group.gather(mine[0])

    def at_gradient(
        self, rank: int, gradients_RxP: Tensor, rows: Sequence[int]
    ) -> Iterator[tuple[int, Tensor, Sequence[int]]]:
        index = torch.tensor(rows, device=gradients_RxP.device)
        parts = self.group.gather(gradients_RxP[index])
        for each in self.sequence():
            yield each, parts[each], range(len(rows))
        gradients_RxP[index] = parts[rank]

    def told(self, mine: Sequence[T]) -> Sequence[T]:
        of_ranks = self.group.gather_objects(mine)
        return [told for rank in self.sequence() for told in of_ranks[rank]]

    def own_share(self, count: int) -> Sequence[int]:
        each = -(-count // self.count)
        return [number % count for number in range(self.group.rank, each * self.count, self.count)]  # equally many

    def joined(self, mine: Tensor, count: int) -> Tensor:
        return self.group.gather(mine).transpose(0, 1).flatten(0, 1)[:count]

    def agreed(self, choice: bool) -> bool:
        return bool(self.group.from_first(choice))

    def verify(self, state: Replica) -> None:
        tensors, values = state()
        sums = {name: _sum_of_bits(x) for name, x in tensors.items()}
        records = json.dumps({part: values[part] for part in ("rows", "agenda")})
        sums["records"] = int(hashlib.sha256(records.encode()).hexdigest()[:15], 16)
        first, *others = self.group.gather_objects(sums)
        for rank, theirs in enumerate(others, start=1):
            if theirs != first:
                names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
                raise ReplicasDiffer(
                    f"ranks 0 and {rank} should have the same state and differ in {', '.join(names)}: memory or "
                    f"arithmetic of one was corrupted, and nothing of it was stored"
                )


def _sum_of_bits(x: Tensor) -> int:
    """Of all elements' bits, as integers. A change of one element changes it."""
    return int(x.detach().reshape(-1).view(WORDS[x.element_size()]).sum(dtype=torch.int64))


class Unsaved(Checkpoints):
    """Those of a rank that leaves saving to rank 0, and asks it when one is due."""

    def is_due(self, step: int) -> bool:
        return False

    def save(self, *state: Any) -> None:
        """Rank 0 does."""
