"""Small models and training loops that know nothing of the harness."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import attach
from harness.user_loop.named_tensors import raw_bytes

STEPS = 50
VOCABULARY, CONTEXT, BATCH = 40, 8, 4


@dataclass
class Loop:
    """A model with all that trains it; `body` is one pass, which gives the loss."""

    model: nn.Module
    optimizer: Any
    extra: list[Any]
    loader: Callable[[], Iterable[Any]]
    body: Callable[[Any], Tensor]
    kept: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers, and what the optimizers keep."""
        found = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for place, kept in enumerate(optimizer.state.values()):
                found |= {f"{number} {place} {k}": v.clone() for k, v in kept.items() if isinstance(v, Tensor)}
        return found

    @property
    def optimizers(self) -> list[Any]:
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]


def seeded(seed: int = 0) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Texts(torch.utils.data.Dataset):
    """Token ids with their successors, [T] each: a noisy walk, of which something can be learned."""

    def __init__(self, count: int):
        draw = np.random.default_rng(0)
        steps = draw.choice([1, 2, 7], size=(count, CONTEXT + 1), p=[0.7, 0.2, 0.1])
        self.ids = torch.tensor(np.cumsum(steps, 1) % VOCABULARY)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index, :-1], self.ids[index, 1:]


class Mixer(nn.Module):
    """A causal toy language model with dropout; embedding and head are tied."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            shared = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            x = x + self.dropout(torch.tanh(layer(shared)))
        return self.head(self.norm(x))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def shuffled(passes: int = STEPS) -> Callable[[], Iterable[Any]]:
    texts = Texts(passes * BATCH)
    return lambda: torch.utils.data.DataLoader(texts, batch_size=BATCH, shuffle=True)


def plain() -> Loop:
    """AdamW with two parameter groups, clipping and a scheduler; the gradient is cleared before the backward pass."""
    seeded()
    model = Mixer()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def body(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return loss

    return Loop(model, optimizer, [scheduler], shuffled(), body)


def convolutions() -> Loop:
    """SGD with momentum on pictures, with batch normalisation; the gradient is cleared after the step."""
    seeded()
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pictures = torch.randn(STEPS * 8, 1, 8, 8)
    data = torch.utils.data.TensorDataset(pictures, (pictures.mean((1, 2, 3)) * 20).round().clamp(-1, 1).long() + 1)

    def body(batch: Any) -> Tensor:
        pictures, labels = batch
        loss = F.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return Loop(model, optimizer, [], lambda: torch.utils.data.DataLoader(data, batch_size=8, shuffle=True), body)


def scaled() -> Loop:
    """Half precision with a GradScaler; gradients of two passes are accumulated, and clipped once unscaled."""
    seeded()
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
    loop = Loop(model, optimizer, [scaler], shuffled(2 * STEPS), lambda batch: batch, {"passes": 0})

    def body(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch)
        scaler.scale(loss / 2).backward()
        loop.kept["passes"] += 1
        if loop.kept["passes"] % 2 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss

    loop.body = body
    return loop


def several() -> Loop:
    """Two optimizers that step together: SGD for matrices, Adam for the rest."""
    seeded()
    model = Mixer()
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=0.05, momentum=0.9),
        torch.optim.Adam([p for p in model.parameters() if p.dim() != 2], lr=1e-2),
    ]

    def body(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return Loop(model, optimizers, [], shuffled(), body)


LOOPS = {"plain": plain, "convolutions": convolutions, "scaled": scaled, "several": several}


def train(loop: Loop) -> list[float]:
    """The losses of all passes, without the harness."""
    return [loop.body(batch).item() for batch in loop.loader()]


def attached(loop: Loop, **options: Any) -> tuple[list[float], Any]:
    """The losses of all passes, and the run."""
    losses = []
    with attach(loop.model, loop.optimizer, extra=loop.extra, **options) as run:
        for batch in run.steps(loop.loader()):
            loss = loop.body(batch)
            run.observe(loss)
            losses.append(loss.item())
    return losses, run


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(raw_bytes(one[name]) == raw_bytes(other[name]) for name in one)
