"""Healthy training loops of many kinds, in which nothing is wrong: no detector should say anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.user_loop.loops import seeded
from tests.user_loop.scripts import Bare, Script

STEPS, EPOCH, BATCH = 240, 40, 64


def _points(seed: int, features: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(EPOCH * BATCH, features, generator=draw)
    return x, (x[:, :2] @ torch.randn(2, 3, generator=draw) + x[:, 2:5].sin()).argmax(1)


def _net(width: int, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))


def epochs_of(
    seed: int, model: nn.Module, optimizer: Any, schedule: Any, clip: float | None = None, size: int = BATCH
) -> Script:
    """Shuffled epochs, whose last batch is short where `size` does not divide them; the schedule steps between."""
    x, y = _points(seed)
    rows = torch.utils.data.TensorDataset(x, y)

    def go(run: Any) -> None:
        for _ in run.epochs(STEPS // EPOCH):
            loader = torch.utils.data.DataLoader(rows, batch_size=size, shuffle=True)
            for inputs, labels in run.steps(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                run.observe(loss)
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(loss.item())
            elif schedule:
                schedule.step()

    return Script(model, [optimizer], [schedule] if schedule else [], go)


def step_rates(seed: int, optimizer: Callable[..., Any], gamma: float, **options: Any) -> Script:
    seeded(seed)
    model = _net(16 + 8 * (seed % 3))
    made = optimizer(model.parameters(), **options)
    return epochs_of(seed, model, made, torch.optim.lr_scheduler.StepLR(made, 1, gamma))


def short_batches(seed: int) -> Script:
    """The last batch of an epoch has 40 rows of 63."""
    seeded(seed)
    model = _net(24)
    made = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return epochs_of(seed, model, made, None, size=BATCH - 1)


def plateau(seed: int) -> Script:
    seeded(seed)
    model = _net(24)
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return epochs_of(seed, model, made, torch.optim.lr_scheduler.ReduceLROnPlateau(made, factor=0.1, patience=0))


def by_steps(make: Callable[[], tuple[nn.Module, Any, Any, Callable[[int], Tensor]]], seed: int) -> Script:
    """A loop without epochs: a step is `loss_of(number)`."""
    seeded(seed)
    model, optimizer, schedule, loss_of = make()

    def go(run: Any) -> None:
        for number in run.steps(STEPS):
            optimizer.zero_grad()
            loss = loss_of(number)
            loss.backward()
            optimizer.step()
            if schedule:
                schedule.step()
            run.observe(loss)

    return Script(model, [optimizer], [schedule] if schedule else [], go)


class Graph(nn.Module):
    """Two graph convolutions with dropout (Kipf & Welling 2017, arXiv 1609.02907), on a random graph."""

    def __init__(self, nodes: int = 120):
        super().__init__()
        links = (torch.rand(nodes, nodes) < 0.05).float()
        links = ((links + links.T + torch.eye(nodes)) > 0).float()
        scale = links.sum(1).rsqrt()
        self.register_buffer("links", scale[:, None] * links * scale)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(self.links @ self.one(F.dropout(x, 0.5))), 0.5)
        return self.links @ self.two(hidden)


def graph(seed: int) -> Script:
    """Full batches, Adam at 1e-2 with weight decay, and a third of the labels."""

    def make() -> Any:
        model = Graph()
        labels = torch.randint(4, (120,))
        x = F.one_hot(labels, 16).float() * 0.5 + torch.rand(120, 16)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
        return model, optimizer, None, lambda number: F.cross_entropy(model(x)[:40], labels[:40])

    return by_steps(make, seed)


class Residual(nn.Module):
    """A convolution with batch normalisation, and a branch beside it."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def residual(seed: int) -> Script:
    """SGD with momentum and weight decay; the rate falls to a tenth twice."""

    def make() -> Any:
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            Residual(8),
            Residual(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )
        pictures = torch.randn(256, 1, 8, 8)
        labels = (pictures.mean((1, 2, 3)) * 8).round().clamp(-1, 2).long() + 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2, 3 * STEPS // 4])

        def loss_of(number: int) -> Tensor:
            rows = torch.randint(256, (32,))
            return F.cross_entropy(model(pictures[rows]), labels[rows])

        return model, optimizer, schedule, loss_of

    return by_steps(make, seed)


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 2, whose second matrix starts at zero (LoRA: Hu et al. 2021)."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, inner.in_features) / inner.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(inner.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(F.linear(x, self.a), self.b)


def adapters(seed: int) -> Script:
    def make() -> Any:
        model = nn.Sequential(Adapted(nn.Linear(8, 32)), nn.Tanh(), Adapted(nn.Linear(32, 3)))
        x, y = _points(seed)
        optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=1e-2)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 20)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [20])

        def loss_of(number: int) -> Tensor:
            rows = torch.randint(len(x), (BATCH,))
            return F.cross_entropy(model(x[rows]), y[rows])

        return model, optimizer, schedule, loss_of

    return by_steps(make, seed)


def encoder(seed: int) -> Script:
    """A variational autoencoder."""

    def make() -> Any:
        model = nn.ModuleDict({"encode": nn.Linear(8, 8), "hidden": nn.Linear(4, 16), "decode": nn.Linear(16, 8)})
        x, _ = _points(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def loss_of(number: int) -> Tensor:
            batch = x[torch.randint(len(x), (32,))]
            mean, log_variance = model["encode"](batch).chunk(2, 1)
            z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
            told = model["decode"](F.relu(model["hidden"](z)))
            divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
            return F.mse_loss(told, batch, reduction="sum") / len(batch) + divergence

        return model, optimizer, None, loss_of

    return by_steps(make, seed)


def recurrent(seed: int) -> Script:
    """An LSTM with clipping and SGD at a large rate, as language models had it."""
    seeded(seed)
    model = nn.ModuleDict({"table": nn.Embedding(20, 12), "lstm": nn.LSTM(12, 16), "head": nn.Linear(16, 20)})
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    draw = torch.Generator().manual_seed(seed)
    text = (torch.randint(1, 4, (STEPS * 8 + 1, 4), generator=draw).cumsum(0)) % 20

    def go(run: Any) -> None:
        hidden = None
        for number in run.steps(STEPS):
            hidden = run.carry(hidden=hidden)
            hidden = None if hidden is None else tuple(part.detach() for part in hidden)
            ids = text[8 * number : 8 * number + 9]
            model.zero_grad()
            out, hidden = model["lstm"](model["table"](ids[:-1]), hidden)
            loss = F.cross_entropy(model["head"](out).flatten(0, 1), ids[1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def restored(seed: int) -> Script:
    """The loop loads its best weights again, and its optimizer's state, twice."""
    seeded(seed)
    model = _net(24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = _points(seed)

    def go(run: Any) -> None:
        kept: Any = None
        for number in run.steps(STEPS):
            kept = run.carry(kept=kept)
            if number == 40:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                kept = {key: _copy(value) for key, value in state.items()}
            if number in (100, 170):
                model.load_state_dict(kept["model"])
                optimizer.load_state_dict(kept["optimizer"])
            rows = torch.randint(len(x), (BATCH,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def _copy(state: Any) -> Any:
    import copy

    return copy.deepcopy(state)


def unfrozen(seed: int) -> Script:
    """One layer more is trained every 60 steps, from the last one on."""
    seeded(seed)
    model = _net(24)
    layers = [part for part in model if isinstance(part, nn.Linear)]
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, y = _points(seed)

    def go(run: Any) -> None:
        for number in run.steps(STEPS):
            if number in (60, 120):
                layers[-1 - number // 60].requires_grad_(True)
            rows = torch.randint(len(x), (BATCH,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


HEALTHY: dict[str, Callable[[int], Script]] = {
    "SGD, rate halved": lambda seed: step_rates(seed, torch.optim.SGD, 0.5, lr=0.05, momentum=0.9),
    "SGD, rate to a tenth": lambda seed: step_rates(seed, torch.optim.SGD, 0.1, lr=0.05, momentum=0.9),
    "Adam, rate halved": lambda seed: step_rates(seed, torch.optim.Adam, 0.5, lr=1e-2),
    "AdamW, rate to a tenth": lambda seed: step_rates(seed, torch.optim.AdamW, 0.1, lr=1e-2),
    "RMSprop, rate to a tenth": lambda seed: step_rates(seed, torch.optim.RMSprop, 0.1, lr=3e-3),
    "a short last batch": short_batches,
    "rate that follows the loss": plateau,
    "graph": graph,
    "residual": residual,
    "adapters": adapters,
    "variational": encoder,
    "recurrent": recurrent,
    "restored": restored,
    "unfrozen": unfrozen,
}


def bare(make: Callable[[int], Script], seed: int) -> Script:
    script = make(seed)
    script.go(Bare(STEPS))
    return script


def alarms_of(run: Any) -> Iterator[int]:
    """The steps with an alarm of any detector."""
    signals = run.signals
    for name, values in signals.items():
        if name.startswith("alarm_"):
            yield from values.nonzero()[0].tolist()
