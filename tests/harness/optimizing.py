"""Optimizers without a pack: a few tensors, gradients that are drawn or written by hand, and trials that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from harness.config import Optim, Trial, sections
from harness.model.parameters import Layout
from harness.model.state import State
from harness.model.tensors import Kind, ScaledTensor
from harness.optim.optimizers import OPTIMIZERS, Norms, Optimizer

STEPS = 50
CPU = torch.device("cpu")


def tensor_row(name: str, shape: tuple[int, ...], kind: Kind, **multipliers: float) -> ScaledTensor:
    return ScaledTensor(name, shape, kind, False, 0, **multipliers)


TENSORS = (
    tensor_row("embedding", (12, 6), Kind.EMBEDDING),
    tensor_row("square", (6, 6), Kind.HIDDEN, learning_rate=0.5, decay=2.0, epsilon=3.0),
    tensor_row("tall", (17, 5), Kind.RESIDUAL, learning_rate=0.5, decay=2.0, epsilon=3.0),
    tensor_row("head", (12, 6), Kind.HEAD),  # starts at zero
    tensor_row("gains", (3, 6), Kind.GAIN, decay=0.0),  # of several heads: vectors side by side
    tensor_row("gain", (6,), Kind.GAIN, decay=0.0),
    tensor_row("scale", (1,), Kind.SCALE, decay=0.0),
)

LONG = (  # several blocks, groups and gaps; the third tensor is not learned
    tensor_row("embedding", (61, 37), Kind.EMBEDDING),
    tensor_row("wide", (24, 96), Kind.HIDDEN, learning_rate=0.5, decay=2.0, epsilon=3.0),
    tensor_row("fixed", (16,), Kind.SHIFT, learning_rate=0.0),
    tensor_row("gain", (6,), Kind.GAIN, decay=0.0),
    tensor_row("scale", (1,), Kind.SCALE, decay=0.0),
)
STACKED = (  # the second begins where no vector does
    tensor_row("key", (9, 5), Kind.HIDDEN),
    ScaledTensor("value", (7, 5), Kind.HIDDEN, stacked=True, learning_rate=0.5),
    tensor_row("gain", (6,), Kind.GAIN, decay=0.0),
)


def trial(name: str, seed: int = 0, options: Mapping[str, Any] | None = None, **optim: Any) -> Trial:
    """A trial with this optimizer; `options` are those of the optimizer's own section."""
    parts = {name: sections()[name](**options)} if options else {}
    plain = {"beta2": 0.999, "clip": None, "decay_follows": "rate"}
    return Trial.of({"optim": Optim(name=name, **(plain | optim)), **parts}, seed=seed)


def different(
    name: str, count: int = 3, options: Sequence[Mapping[str, Any]] | None = None, **optim: Any
) -> list[Trial]:
    """Trials that differ in everything that every optimizer has; `options` are taken by turns."""
    return [
        trial(
            name,
            seed=r,
            options=options[r % len(options)] if options else None,
            **{
                "lr": 3e-3 * (1 + r),
                "beta1": (0.9, 0.8, 0.95, 0.5)[r % 4],
                "beta2": (0.999, 0.95, 0.99, 0.9)[r % 4],
                "eps": (1e-8, 1e-4, 1e-6)[r % 3],
                "weight_decay": 0.1 * r,
                **optim,
            },
        )
        for r in range(count)
    ]


class Rig:
    """An optimizer, and the weights and gradients that it works on, [R, P] each."""

    def __init__(
        self, trials: Sequence[Trial], rows: Sequence[ScaledTensor] = TENSORS, dtype: torch.dtype = torch.float64
    ):
        self.trials, self.layout, self.state = list(trials), Layout(tuple(rows)), State(2 * len(trials) + 2)
        weights = torch.zeros(len(trials), self.layout.size, dtype=dtype)
        for scaled in rows:
            if scaled.kind != Kind.HEAD:
                for r, trial in enumerate(trials):
                    self.layout.view(weights, scaled.name)[r] = drawn(scaled, trial.seed, -1).to(dtype)
        self._weights = self.state.add("weights", weights)
        self._gradients = self.state.add("gradients", torch.zeros_like(weights), scratch=True)
        cls = OPTIMIZERS[trials[0].optim.name]
        self.optimizer: Optimizer = cls(self.layout, self._weights, self._gradients, self.state)
        self.optimizer.bind(self.trials)

    @property
    def weights(self) -> Tensor:
        return self._weights.used

    @property
    def gradients(self) -> Tensor:
        return self._gradients.used

    def view(self, name: str, row: int, slot: str | None = None) -> Tensor:
        """A tensor of one trial, or what the optimizer keeps for it."""
        return self.layout.view(self.weights if slot is None else self.optimizer.slot(slot), name)[row]

    def arrange(self, sources: Sequence[int]) -> None:
        """Rows are now copies of these rows."""
        self.trials = [self.trials[row] for row in sources]
        self.state.arrange(sources)
        self.optimizer.bind(self.trials)

    def draw(self, step: int) -> None:
        """The gradients of a step: each trial's follow from its seed alone."""
        for scaled in self.layout.tensors:
            for r, trial in enumerate(self.trials):
                self.layout.view(self.gradients, scaled.name)[r] = drawn(scaled, trial.seed, step).to(
                    self.weights.dtype
                )

    def step(
        self, rates: Sequence[float] | None = None, active: Sequence[bool] | None = None, measure: bool = True
    ) -> Norms | None:
        found = rates or [trial.optim.lr for trial in self.trials]
        moves = torch.tensor(active if active is not None else [True] * len(self.trials))
        return self.optimizer.step(torch.tensor(found, dtype=self.weights.dtype), moves, measure)

    def train(self, steps: int, start: int = 0, active: Sequence[bool] | None = None) -> None:
        """Steps with gradients that are drawn and the rates of `share`."""
        for step in range(start, start + steps):
            self.draw(step)
            self.step([trial.optim.lr * share(step) for trial in self.trials], active)

    def everything(self, row: int) -> dict[str, Tensor]:
        """All that a trial has, by name."""
        return {name: values[row].clone() for name, values in self.state}


def drawn(scaled: ScaledTensor, seed: int, step: int) -> Tensor:
    """Normal numbers of another size in every step and tensor, float64; of size one in step -1."""
    return _drawn(scaled.name, scaled.shape, seed, step).clone()


@lru_cache(4096)
def _drawn(name: str, shape: tuple[int, ...], seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(seed, step, name))
    size = 1.0 if step < 0 else 10.0 ** float(torch.randint(-3, 2, (), generator=generator))
    return size * torch.randn(shape, dtype=torch.float64, generator=generator)


def hash_of(seed: int, step: int, name: str) -> int:
    return (seed * 1000 + step + 1) * 1000 + sum(name.encode())


def share(step: int) -> float:
    """The rate of a step over its peak: up, down, and once zero."""
    return (0.1, 0.5, 1.0, 0.7, 0.0)[step % 5]


def without(trial: Trial, **optim: Any) -> Trial:
    """The same trial with other values of `optim`."""
    return replace(trial, optim=replace(trial.optim, **optim))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 4: torch.int32, 8: torch.int64}[x.element_size()])


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """The names under which two trials differ in any bit."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(bits(left[name]), bits(right[name]))]


# --- against what others make of the same gradients -----------------------------------------------------------------

TOLERANCE = 1e-9  # float64 rounds at 1e-16; what divides gradients by their own size amplifies that
MATRICES = ("embedding", "square", "tall", "head")
STABLE_SPAM = [{"interval": 20}, {"gamma1": 0.85, "gamma2": 0.99, "interval": 13}, {"gamma3": 0.9, "interval": 1000}]


def taken(trial: Trial, scaled: ScaledTensor, rate: float) -> float:
    """The share of a tensor's weights that decay takes, where it follows the rate."""
    return trial.optim.weight_decay * scaled.decay * rate * scaled.learning_rate


def rates(trial: Trial) -> list[float]:
    return [trial.optim.lr * share(step) for step in range(STEPS)]


def starts(trial: Trial) -> dict[str, Tensor]:
    """The weights before the first step, as `Rig` has them."""
    found = {scaled.name: drawn(scaled, trial.seed, -1) for scaled in TENSORS}
    return {**found, "head": torch.zeros_like(found["head"])}


def assert_equals(
    trials: Sequence[Trial], expected: Callable[[Trial], Mapping[str, Tensor]], tolerance: float = TOLERANCE
) -> None:
    """Trains all trials as one pack, and compares the weights of each."""
    rig = Rig(trials)
    rig.train(STEPS)
    for r, trial in enumerate(trials):
        for name, values in expected(trial).items():
            found, start = rig.view(name, r), starts(trial)[name]
            torch.testing.assert_close(found, values, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
            assert (found - start).abs().max() > 1e-3 * trial.optim.lr, f"{name} hardly moved, which says little"


def betas(trial: Trial) -> tuple[float, float]:
    return trial.optim.beta1, trial.optim.beta2
