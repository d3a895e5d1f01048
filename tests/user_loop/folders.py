"""Results folders of attached runs and campaigns of every kind, each of a tiny loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harness import ConfigError, attach

STEPS = 12
BIT = {"name": "weight_bit", "tensor": "0.weight", "start": 5, "bit": 30}
FLIPS = {"name": "bit_flip", "tensor": "0.weight", "start": 4, "until": 8}


class Regression:
    """A loop that knows nothing of the harness: two linear layers fit a sum, and the second learns nothing."""

    def __init__(self, seed: int = 0, scale: float = 1.0, lr: float = 0.3):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 1))
        groups = [{"params": self.model[0].parameters()}, {"params": self.model[2].parameters(), "lr": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=lr)
        self.scale = scale

    def loader(self, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(steps, 8, 4, generator=draw)
        return [(x, x.sum(1, keepdim=True)) for x in inputs]

    def body(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = self.scale * F.mse_loss(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


def run(
    out: Path, steps: int = STEPS, seed: int = 0, scale: float = 1.0, lr: float = 0.3, ends: int = 0, **options: Any
) -> None:
    """One attached run; with `ends` it raises an error before that step."""
    loop = Regression(seed, scale, lr)
    with attach(loop.model, loop.optimizer, out=out, seed=seed, **options) as attached:
        for batch in attached.steps(loop.loader(steps)):
            if ends and attached.step == ends:
                raise InterruptedError
            attached.observe(loop.body(batch))


def campaign(out: Path, samples: int = 4, lr: float = 0.3, **fault: Any) -> None:
    loop = Regression(lr=lr)

    def body(attached: Any) -> None:
        for batch in attached.steps(loop.loader(STEPS)):
            attached.observe(loop.body(batch))

    attach.campaign(body, loop.model, loop.optimizer, fault=FLIPS | fault, samples=samples, out=out)


def several(out: Path) -> None:
    """Two seeds, with and without a fault, with a twin and without, and of different lengths."""
    for seed in (0, 1):
        run(out, seed=seed)
        run(out, seed=seed, steps=8, fault=BIT)
        run(out, seed=seed, fault=BIT | {"bit": 24}, twin=True)


def lengths(out: Path) -> None:
    """Runs of one, two and three steps."""
    for steps in (1, 2, 3):
        run(out, steps=steps, fault=BIT | {"start": 0}, twin=True)
        run(out, steps=steps)


def rates(out: Path) -> None:
    """Two learning rates: runs, and campaigns."""
    for lr in (0.1, 0.3):
        run(out, lr=lr, seed=3)
        campaign(out, lr=lr)


def cut_short(out: Path) -> None:
    with contextlib.suppress(InterruptedError):
        run(out, ends=6, fault=BIT)


def refused(out: Path) -> None:
    """A store without trials."""
    with contextlib.suppress(ConfigError):
        campaign(out, elements=16)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "no fault": run,
    "a fault, no twin": lambda out: run(out, fault=BIT),
    "a fault and its twin": lambda out: run(out, fault=BIT, twin=True),
    "answers": lambda out: run(out, fault={"name": "nan_gradient", "start": 5}, recover="repair"),
    "answers and a twin": lambda out: run(out, fault=BIT, recover="rerun", twin=True),
    "answers without a fault": lambda out: run(out, recover="repair"),
    "several runs": several,
    "a campaign": campaign,
    "a campaign of one fault": lambda out: campaign(out, samples=1),
    "a campaign, all masked": lambda out: campaign(out, site="gradient", tensor="2.weight", bit=3),
    "a campaign, all non-finite at once": lambda out: campaign(out, tensor="2.weight", start=0, until=0, bit=30),
    "a campaign with clean twins": lambda out: (campaign(out), campaign(out, name="last_bit", samples=8)),
    "few steps": lengths,
    "one step": lambda out: run(out, steps=1),
    "two learning rates": rates,
    "cut short": cut_short,
    "no trial": refused,
    "no loss is a number": lambda out: run(out, scale=float("nan")),
    "no loss is a number, with a fault": lambda out: run(out, scale=float("nan"), fault=BIT, twin=True),
}
