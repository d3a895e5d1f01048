"""How far one wrong value gets within a step, and what accumulation and checkpointing leave as it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class TinyGPT(nn.Module):
    """One block of a pre-LN decoder with two heads, as plain as it can be; `nan_head` has a NaN in its output."""

    def __init__(self, vocabulary: int = 32, width: int = 16, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.projection = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, nan_head: int | None = None, is_checkpointed: bool = False) -> Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self._block, x, nan_head, use_reentrant=False) if is_checkpointed else self._block(x, nan_head)
        logits: Tensor = self.head(x)
        return logits

    def _block(self, x: Tensor, nan_head: int | None) -> Tensor:
        normed = self.attention_norm(x)
        queries, keys, values = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        if nan_head is not None:
            mixed = mixed.clone()
            mixed[0, nan_head, 0, 0] = math.nan
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(nn.functional.gelu(self.up(self.feedforward_norm(x))))
        return added


def gradients(
    tokens: Tensor, seed: int = 0, nan_head: int | None = None, is_checkpointed: bool = False
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a `TinyGPT` on tokens [B, T+1], and its gradients by name."""
    torch.manual_seed(seed)
    model = TinyGPT()
    logits = model(tokens[:, :-1], nan_head, is_checkpointed)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return float(loss.detach()), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def nan_shares(is_clipped: bool) -> tuple[float, dict[str, float]]:
    """The loss, and the share of each tensor's gradient that is not finite, after one NaN in one head's output.

    `is_clipped`: by global norm, as usual. Tokens 16 and up are not in the batch.
    """
    tokens = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        loss, found = gradients(tokens, nan_head=0)
    if is_clipped:
        norm = torch.stack([x.norm() for x in found.values()]).norm()
        found = {name: x * (1 / norm).clamp(max=1.0) for name, x in found.items()}
    return loss, {name: float((~x.isfinite()).double().mean()) for name, x in found.items()}


def is_checkpointing_exact() -> bool:
    """Whether gradients with activation checkpointing are those without, bit for bit."""
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        (_, one), (_, other) = (gradients(tokens, is_checkpointed=which) for which in (False, True))
    return all(torch.equal(one[name], other[name]) for name in one)


def accumulation_error(lengths: tuple[int, ...]) -> float:
    """Relative error of the mean of micro-batches' gradients, which are means over their tokens, in float64.

    The truth is the mean over all tokens. Zero, but for rounding, where all have the same number of tokens.
    """
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(length, 8, dtype=torch.float64, generator=generator) for length in lengths]  # one a token
    accumulated = torch.stack([part.mean(0) for part in parts]).mean(0)
    exact = torch.cat(parts).mean(0)
    return float((accumulated - exact).norm() / exact.norm())


def reduced(ranks: int, wrong: float) -> float:
    """The mean over ranks of a gradient that is 0 everywhere and `wrong` on one of them."""
    values = torch.zeros(ranks, dtype=torch.float64)
    values[0] = wrong
    return float(values.mean())
