"""A GPT in plain PyTorch, one at a time: the independent peer of `harness` in tests and benchmarks.

It shares no code with `harness`; only `tensors` and `copy_weights` know the names that the harness gives its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns the pair (2i, 2i + 1) of each head by position x 10000^(-2i / head_dim), as Llama's reference code does."""

    def __init__(self, context: int, head_dim: int):
        super().__init__()
        rates = torch.tensor([10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
        self.angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
        self.turns: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        if self.turns is None or self.turns.dtype != pairs.dtype or self.turns.device != pairs.device:
            self.turns = torch.complex(self.angles.cos(), self.angles.sin()).to(pairs.device, pairs.dtype)
        return torch.view_as_real(pairs * self.turns).flatten(-2)


class Block(nn.Module):
    """Pre-LN attention and feed-forward, without biases."""

    def __init__(
        self, width: int, hidden: int, head_dim: int, swiglu: bool, qk_norm: bool, epsilon: float, scale: float
    ):
        super().__init__()
        self.head_dim, self.swiglu, self.scale = head_dim, swiglu, scale
        self.attention_norm = nn.LayerNorm(width, epsilon, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = nn.LayerNorm(head_dim, epsilon, bias=False) if qk_norm else nn.Identity()
        self.key_norm = nn.LayerNorm(head_dim, epsilon, bias=False) if qk_norm else nn.Identity()
        self.projection = nn.Linear(width, width, bias=False)
        self.feedforward_norm = nn.LayerNorm(width, epsilon, bias=False)
        self.up = nn.Linear(width, 2 * hidden if swiglu else hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, -1, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotary(self.query_norm(q)), rotary(self.key_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, context, width))
        hidden = self.up(self.feedforward_norm(x))
        if self.swiglu:
            gate, linear = hidden.chunk(2, -1)
            return x + self.down(F.silu(gate) * linear)
        return x + self.down(F.gelu(hidden))


class PlainGPT(nn.Module):
    """A decoder as one would write it for a single run. The two scales are all that muP asks of the forward pass."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int,
        head_dim: int,
        context: int,
        feedforward: int | None = None,
        activation: str = "gelu",
        positions: str = "rotary",
        qk_norm: bool = False,
        norm_epsilon: float = 1e-6,
        attention_scale: float | None = None,
        output_scale: float = 1.0,
    ):
        super().__init__()
        hidden, scale = feedforward or 4 * width, attention_scale or head_dim**-0.5
        self.output_scale = output_scale
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width) if positions == "learned" else None
        self.rotary = Rotary(context, head_dim) if positions == "rotary" else nn.Identity()
        shape = (width, hidden, head_dim, activation == "swiglu", qk_norm, norm_epsilon, scale)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width, norm_epsilon, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.head(self.final_norm(x)) * self.output_scale


def train_plain(
    model: PlainGPT,
    batch: Callable[[int], Tensor],
    steps: int,
    lr: float,
    clip: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    wider: float = 1.0,
    schedule: Callable[[int], float] = lambda step: 1.0,
    fused: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradient norm before clipping of every step, as scalar tensors.

    `batch(step)` is [B, T + 1] token ids, `schedule(step)` the share of the learning rates in force at that step,
    `wider` how many times the base width this is, for muP: matrices inside the blocks take a rate smaller by that and a
    decay larger by it, and all that is there an epsilon smaller by it. Gains of norms do not decay. `optimizer`, at a
    constant rate, takes the place of this one.
    """
    inside, outside = (
        [*model.blocks.parameters()],
        [p for n, p in model.named_parameters() if not n.startswith("blocks.")],
    )
    small, own = [p for p in inside if p.dim() == 1], {"peak": lr, "weight_decay": 0.0}
    hidden = {"peak": lr / wider, "weight_decay": weight_decay * wider, "eps": eps / wider}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in inside if p.dim() == 2], **hidden},
        {"params": [p for p in outside if p.dim() == 2], "peak": lr},
        {"params": [p for p in outside if p.dim() == 1] + (small if wider == 1 else []), **own},
        *([{"params": small, **own, "eps": eps / wider}] if wider != 1 else ()),
    ]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
    losses, norms = [], []
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = group["peak"] * schedule(step)
        tokens = batch(step)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip))
        (optimizer or adamw).step()
        losses.append(loss.detach())
    return losses, norms


def tensors(model: PlainGPT) -> dict[str, Tensor]:
    """The model's weights, or parts of them, under the names that the harness gives them."""
    found = {"embedding": model.embedding.weight, "head": model.head.weight, "final_norm": model.final_norm.weight}
    if model.positions is not None:
        found["positions"] = model.positions.weight
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        inside: dict[str, Tensor] = dict(_named(("query", "key", "value"), block.qkv.weight, "attention."))
        inside["attention.projection"] = block.projection.weight
        up = ("gate", "up") if block.swiglu else ("up",)
        inside |= _named(up, block.up.weight, "feedforward.")
        inside["feedforward.down"] = block.down.weight
        inside |= {"attention_norm": block.attention_norm.weight, "feedforward_norm": block.feedforward_norm.weight}
        for name, norm in (("attention.query_norm", block.query_norm), ("attention.key_norm", block.key_norm)):
            if isinstance(norm, nn.LayerNorm):
                inside[name] = norm.weight
        found |= {f"blocks.{i}.{name}": weight for name, weight in inside.items()}
    return found


def _named(names: Sequence[str], stacked: Tensor, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: part for name, part in zip(names, stacked.chunk(len(names)), strict=True)}


def copy_weights(model: PlainGPT, pack: Any, row: int) -> None:
    """Give the model the weights of one row of a harness Pack, tensor by tensor."""
    source = pack.tensors(pack.weights, row)
    target = tensors(model)
    assert target.keys() == source.keys(), target.keys() ^ source.keys()
    with torch.no_grad():
        for name, weight in target.items():
            weight.copy_(source[name])


def plain_of(trial: Any, pack: Any, row: int) -> tuple[PlainGPT, torch.optim.AdamW]:
    """The trial as a plain GPT in float64 with the weights of a row of the pack, and torch's AdamW of its settings."""
    model, optim = trial.model, trial.optim
    plain = PlainGPT(trial.data.vocabulary, model.width, model.depth, model.head_dim, model.context).double()
    copy_weights(plain, pack, row)
    groups = [
        {"params": [p for p in plain.parameters() if (p.dim() == 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, optim.weight_decay), (False, 0.0))
    ]
    return plain, torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
