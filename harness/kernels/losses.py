"""Cross-entropy of a pack's logits: two programs, which read them where they are, and leave their gradient there."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.kernels.launch import launch

MOST = 2048  # logits that a program holds at a time


def log_likelihood(logits_RxNxV: Tensor, targets_RxN: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token's target, [R, N], and the logarithm of the sum of exponentials; contiguous logits."""
    losses: tuple[Tensor, Tensor] = torch.ops.stability_harness.log_likelihood(logits_RxNxV, targets_RxN)
    return losses


def likelihood_backward(
    logits_RxNxV: Tensor, targets_RxN: Tensor, log_z_RxN: Tensor, share_RxN: Tensor, each_RxN: Tensor, masked: bool
) -> None:
    """In place of the logits (share x p - 1 for the target) x each; with `masked` 0 where `each` is, whatever p is."""
    arguments = logits_RxNxV, targets_RxN, log_z_RxN, share_RxN.contiguous(), each_RxN.contiguous()
    torch.ops.stability_harness.likelihood_backward(*arguments, masked)


def _sizes(vocabulary: int) -> dict[str, int]:
    columns = max(16, min(MOST, 1 << (vocabulary - 1).bit_length()))
    return {"COLUMNS": columns, "num_warps": max(1, min(8, columns // 128))}


@torch.library.custom_op("stability_harness::log_likelihood", mutates_args=())
def _log_likelihood(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    import triton.language as tl

    found, log_z = _log_likelihood_empty(logits, targets)
    state = getattr(tl, str(logits.dtype).removeprefix("torch."))
    arrays = (logits, targets.contiguous(), found, log_z)
    launch("log_likelihood", (targets.numel(),), *arrays, logits.shape[-1], **_sizes(logits.shape[-1]), STATE=state)
    return found, log_z


@_log_likelihood.register_fake
def _log_likelihood_empty(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(targets.shape), logits.new_empty(targets.shape)


@torch.library.custom_op("stability_harness::likelihood_backward", mutates_args=("logits",))
def _likelihood_backward(
    logits: Tensor, targets: Tensor, log_z: Tensor, share: Tensor, each: Tensor, masked: bool
) -> None:
    arrays = (logits, targets.contiguous(), log_z, share, each)
    launch("likelihood_back", (targets.numel(),), *arrays, logits.shape[-1], **_sizes(logits.shape[-1]), MASKED=masked)


@_likelihood_backward.register_fake
def _(logits: Tensor, *others: object) -> None:
    pass
