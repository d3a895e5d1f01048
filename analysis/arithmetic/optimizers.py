"""What one large gradient, a learning rate and a loss come to under Adam, in closed form or step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BETA1 = 0.9


def steps_after_outlier(factor: float, beta2: float, steps: int, beta1: float = BETA1) -> list[float]:
    """Adam's updates, in units of the learning rate, at and after one gradient of `factor` times the usual size.

    The gradients before and after have size 1 and mean 0, so the first moment is that of the outlier alone, and the
    second had come to 1.
    """
    moment_1, moment_2, found = 0.0, 1.0, []
    for step in range(steps):
        gradient, size = (factor, factor**2) if step == 0 else (0.0, 1.0)
        moment_1 = beta1 * moment_1 + (1 - beta1) * gradient
        moment_2 = beta2 * moment_2 + (1 - beta2) * size
        found.append(moment_1 / math.sqrt(moment_2))
    return found


def largest_update(beta2: float, beta1: float = BETA1) -> float:
    """The bound of Adam's update for one outlier however large, in units of the learning rate.

    (1 - beta1) / sqrt(1 - beta2), after Kingma & Ba 2015 (arXiv 1412.6980, section 2.1), where it is above 1.
    """
    return (1 - beta1) / math.sqrt(1 - beta2)


def second_moment_after(factor: float, beta2: float) -> float:
    """By how much the second moment grows at one gradient of `factor` times the usual size."""
    return beta2 + (1 - beta2) * factor**2


def time_constant(beta: float) -> float:
    """The steps over which a moving average forgets all but 1/e: 1 / (1 - beta)."""
    return 1 / (1 - beta)


def steps_below(share: float, factor: float, beta2: float) -> int:
    """How long one outlier keeps the update of usual gradients below a share of its usual size, in steps.

    The second moment falls as 1 + (1 - beta2) factor^2 beta2^t, and the update is 1 over its root.
    """
    excess = (1 / share**2 - 1) / ((1 - beta2) * factor**2)
    return 0 if excess >= 1 else math.ceil(math.log(excess) / math.log(beta2))


def update_of_scaled(optimizer: str, scales: Sequence[float], steps: int = 20, lr: float = 1e-3) -> list[float]:
    """How far weights move in so many steps if every gradient is multiplied by a scale, for `adamw` or `sgd`.

    The gradients are the same random ones each time; no epsilon, no weight decay.
    """
    moved = []
    for scale in scales:
        generator = torch.Generator().manual_seed(0)
        weight = torch.zeros(64, requires_grad=True)
        if optimizer == "adamw":
            stepping: torch.optim.Optimizer = torch.optim.AdamW([weight], lr=lr, eps=0.0, weight_decay=0.0)
        else:
            stepping = torch.optim.SGD([weight], lr=lr)
        for _ in range(steps):
            weight.grad = scale * torch.randn(64, generator=generator)
            stepping.step()
        moved.append(float(weight.detach().norm()))
    return moved


def logit_gradient(probability: float, classes: int = 256) -> tuple[float, float, float]:
    """The norm of cross-entropy's gradient at the logits of one token, and the bounds between which it lies.

    The target has this probability, the others share the rest; the bounds are 1 - p and sqrt(2) (1 - p).
    """
    rest = (1 - probability) / (classes - 1)
    logits = torch.full((classes,), math.log(rest), dtype=torch.float64)
    logits[0] = math.log(probability)
    logits.requires_grad_()
    torch.nn.functional.cross_entropy(logits[None], torch.zeros(1, dtype=torch.int64)).backward()
    assert logits.grad is not None
    return float(logits.grad.norm()), 1 - probability, math.sqrt(2) * (1 - probability)


def literal_mup_activation(width: int, layers: int = 4, seed: int = 0) -> float:
    """Root mean square of activations where weights of variance 1 / fan-in are also divided by sqrt(fan-in)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, width, generator=generator)
    for _ in range(layers):
        weight = torch.randn(width, width, generator=generator) / math.sqrt(width)
        x = x @ weight / math.sqrt(width)
    return float(x.square().mean().sqrt())


def default_weight_decay() -> float:
    """That of `torch.optim.AdamW`."""
    return float(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults["weight_decay"])
