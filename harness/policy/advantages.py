"""From rewards of a group of completions to their advantages.

GRPO (Shao et al. 2024, arXiv 2402.03300), Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) and RLOO (Ahmadian et al. 2024,
arXiv 2402.14740), with the constants of TRL 1.16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.model import sums

SMALLEST_SPREAD = 1e-4  # added to the standard deviation: that of TRL
BASELINES, SCALES = ("group", "leave_one_out", "none"), ("group", "batch", "none")


def advantages(rewards_RxB: Tensor, group: int, baseline: str, scale: str) -> Tensor:
    """How much better each completion is than what its prompt's group gets, [R, B], in the type of the rewards.

    Args:
        rewards_RxB: Completions of one prompt are neighbours.
        group: How many there are of each prompt; divides B.
        baseline: `group`: the group's mean is taken off; `leave_one_out`: the mean of the others; `none`: nothing.
        scale: What the difference is divided by: the sample standard deviation of the `group` or of the `batch`, and
            1e-4 more; or `none`.

    Returns:
        Exactly 0 in a group of equal rewards, but without a baseline.
    """
    grouped = rewards_RxB.unflatten(1, (-1, group)).contiguous()
    found: Tensor = grouped if baseline == "none" else grouped - sums.mean(grouped)[..., None]
    if baseline == "leave_one_out":
        found = found * (group / (group - 1)) if group > 1 else grouped
    if scale != "none":
        of = grouped if scale == "group" else grouped.flatten(1)[:, None]
        found = found / (spread(of)[..., None] + SMALLEST_SPREAD)
    if baseline != "none" and group > 1:
        found = torch.where((grouped == grouped[..., :1]).all(-1, keepdim=True), 0.0, found)
    return found.flatten(1)


def spread(x_Rxxx: Tensor) -> Tensor:
    """The sample standard deviation along the last dim; 0 of a single number, and of equal ones."""
    count = x_Rxxx.shape[-1]
    if count == 1:
        return torch.zeros_like(x_Rxxx[..., 0])
    off = x_Rxxx - sums.mean(x_Rxxx)[..., None]
    found = (sums.total(off * off) / (count - 1)).sqrt()
    width: Tensor = torch.where((x_Rxxx == x_Rxxx[..., :1]).all(-1), 0.0, found)
    return width


def zero_spread(rewards_RxB: Tensor, group: int) -> Tensor:
    """The share of groups in which all rewards are equal, and of which nothing is learned, float64 [R]."""
    grouped = rewards_RxB.unflatten(1, (-1, group))
    share: Tensor = (grouped == grouped[..., :1]).all(-1).sum(1).double() / grouped.shape[1]
    return share
