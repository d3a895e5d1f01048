"""What ranks do in tests of their processes, which load it: so it loads little."""

from __future__ import annotations

import os
import signal

import torch

from harness.training.distributed import RankGroup


def fails(group: RankGroup, rank: int) -> None:
    """In one rank, after the others have begun to wait for it."""
    group.gather(torch.zeros(1))
    if group.rank == rank:
        raise ValueError("of no use")
    group.gather(torch.zeros(1))


def dies_at_once(group: RankGroup) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exchange(group: RankGroup) -> None:
    """What two tell each other, in every type that is told."""
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        own = torch.full((2, 3), group.rank).to(dtype)
        assert torch.equal(group.gather(own), torch.stack([torch.zeros(2, 3), torch.ones(2, 3)]).to(dtype))
    total = torch.full((5,), float(group.rank + 1))
    group.sum(total)
    assert total.tolist() == [3.0] * 5
    assert group.gather_objects({"rank": group.rank}) == [{"rank": 0}, {"rank": 1}]
    assert group.from_first(7 + group.rank) == 7
    assert group.gather(torch.tensor(float("nan"))).isnan().tolist() == [True, True]
