"""Keys and values of the tokens that a model has read, so that the next token is read alone (a key-value cache)."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.config import Trial
from harness.kernels.use import are_used


class KeyValues:
    """Of one batch of sequences, in one pass after the other; each has the next tokens of all. Without gradients.

    `read` is how many tokens of each sequence have been read.
    """

    def __init__(self) -> None:
        self.read = 0
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def extended(self, name: str, k_RxBxHxTxD: Tensor, v_RxBxHxTxD: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens so far of an attention, of which these are the last."""
        if name in self._kept:
            k, v = self._kept[name]
            k_RxBxHxTxD, v_RxBxHxTxD = torch.cat((k, k_RxBxHxTxD), -2), torch.cat((v, v_RxBxHxTxD), -2)
        self._kept[name] = k_RxBxHxTxD, v_RxBxHxTxD
        return self._kept[name]


def may_read_alone(trial: Trial, device: torch.device) -> bool:
    """Whether the branches of a trial's model read a token as they would with all before it.

    Not a fused attention, or one by programs of Triton, whose mask is a square; not experts with room for so many
    tokens of a batch; not a branch of an installed package, of which nothing is known.
    """
    model, block = trial.model, trial.section("block")
    is_known = block.token_mixer == "attention" and block.channel_mixer in ("feedforward", "moe")
    has_room = block.channel_mixer != "moe" or trial.section("moe").capacity is None
    is_plain = model.explicit_attention and model.positions == "rotary" and not are_used(device)
    return is_known and has_room and is_plain
