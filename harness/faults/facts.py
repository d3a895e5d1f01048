"""What faults may know of the run that they strike: one of ours, by `facts_of`, or one that its owner describes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from harness.config import Model, Train, Trial
from harness.config.fields import scope_of
from harness.config.names import Site
from harness.model.branches import Branches, branches_of
from harness.model.formats import FORMAT_OF, real_view
from harness.model.heads import heads_of
from harness.model.outline import route_shapes, struck_shapes
from harness.model.scaling import tensor_table
from harness.model.tensors import ModelTensor
from harness.optim.optimizers import OPTIMIZERS
from harness.optim.router_bias import RouterBias
from harness.optim.schedules import rates_of, warmup_steps
from harness.policy.sizes import prompt_tokens, trained_sequences

Shapes = Mapping[str, tuple[int, ...]]
FIRST_NUMBER = re.compile(r"(?:[^.]+\.)*?(\d+)(?=\.|$)")
NO_TOKENS = np.zeros(0, np.int64)
HELD_AS: Mapping[str, str] = {
    **dict.fromkeys((Site.GRADIENT, Site.REDUCED_GRADIENT, Site.CLIPPED_GRADIENT, Site.UPDATE), Site.WEIGHT),
    Site.ACTIVATION_GRADIENT: Site.ACTIVATION,
    Site.SAMPLER_WEIGHT: Site.WEIGHT,
}
"""Sites whose tensors are held in the formats of another's."""
IN_A_LOOP = {"optim.name": "optimizer", "train.ranks": "processes", "model.context": "sequence length"}
"""What the user of a loop of their own calls what has a key in a trial."""


@dataclass(frozen=True, eq=False)
class Facts:
    """A run of `steps` steps with these `tensors`, by name and shape. What is left out is something that it lacks.

    `taps` are the activations of one rank's batch, by name and shape; `routes`, likewise, the numbers of the `experts`
    to which its tokens are sent; `slots` the arrays that the optimizer keeps with an element for each weight, such as
    moment_1. `formats` are the number formats in which tensors are held, by site and name (`formats_of`); gradients and
    updates have those of `weight`, gradients of activations those of `activation`. What is left out is held in fp32,
    and in fp64 with the `precision` of that name.

    `buffers` are arrays that the model keeps and no gradient trains, by name and shape.

    A batch has `batch` sequences of `context` tokens. The learning rate of a step is `rate(step)`, and `peak` after a
    warm-up of `warmup` steps. `tokens` is the training text [N], and `token_counts` says how often each token of the
    vocabulary occurs in it. A policy samples so many `completions` every `updates` steps, each of which
    has so many `advantages`: with a critic, one for each token. A record of the fault keeps
    `shape`, by key: what decides which elements there are, and what stands there. What a fault draws follows from
    `seed`.
    """

    steps: int
    tensors: Shapes
    taps: Shapes = field(default_factory=dict)
    seed: int = 0
    optimizer: str = "none"
    slots: tuple[str, ...] = ()
    precision: str = "fp32"
    formats: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    has_loss_scale: bool = False
    keeps_scores: bool = True  # of attention, which a fused kernel does not
    ranks: int = 1
    batch: int = 0
    context: int = 0
    warmup: int = 0
    peak: float = 0.0
    rate: Callable[[int], float] = field(default=lambda step: 0.0, repr=False)
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS, repr=False)
    token_counts: np.ndarray = field(default_factory=lambda: NO_TOKENS, repr=False)
    shape: Mapping[str, Any] = field(default_factory=dict)
    routes: Shapes = field(default_factory=dict)
    experts: int = 0
    buffers: Shapes = field(default_factory=dict)
    completions: int = 0
    advantages: int = 1
    updates: int = 1

    @property
    def is_ours(self) -> bool:
        """Whether the run is a trial, of which a command line says what it is."""
        return self.optimizer in OPTIMIZERS

    def said(self, key: str, value: Any) -> str:
        """A key of a trial and its value; of a run that its owner describes, in words that fit there."""
        return f"{key if self.is_ours else IN_A_LOOP[key]}={value}"

    def format_of(self, site: str, name: str) -> str:
        """The number format in which a tensor of a site is held."""
        return self.named_format(site, name) or ("fp64" if self.precision == "fp64" else "fp32")

    def named_format(self, site: str, name: str) -> str | None:
        """The same; None where `formats` leaves it out."""
        return self.formats.get(HELD_AS.get(site, site), {}).get(name)

    def key(self, *parts: int | str) -> tuple[int | str, ...]:
        """A key for injectors/draws.py that depends on the fault's seed and `parts` alone."""
        return (self.seed, *parts)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, as `Facts.tensors` has it.

    Args:
        tensors: By name, such as `dict(model.named_parameters())`.

    Returns:
        By name; of complex numbers [..., 2]. Integers are left out.
    """
    real = {name: real_view(x) for name, x in tensors.items()}
    return {name: tuple(x.shape) for name, x in real.items() if x.dtype in FORMAT_OF}


def formats_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The number format of each tensor, as `Facts.formats` has it.

    Args:
        tensors: By name.

    Returns:
        By name: `fp32`, `bf16`, ... Integers are left out.
    """
    real = {name: real_view(x) for name, x in tensors.items()}
    return {name: FORMAT_OF[x.dtype] for name, x in real.items() if x.dtype in FORMAT_OF}


def layer_of(name: str) -> tuple[str, int] | None:
    """What a name has up to its first number, and that: (`blocks.3`, 3), (`transformer.h.3`, 3); None without one."""
    found = FIRST_NUMBER.match(name)
    return (found.group(), int(found.group(1))) if found else None


def facts_of(trial: Trial, tokens: np.ndarray = NO_TOKENS, token_counts: np.ndarray = NO_TOKENS) -> Facts:
    """The facts of a trial of ours.

    Args:
        trial: Its configuration.
        tokens: The training text [N], int64.
        token_counts: How often each token of the vocabulary occurs in it. Without text the rest is known all the same.

    Returns:
        What its fault may know.
    """
    model, train = trial.model, trial.train
    vocabulary = len(token_counts) or trial.data.vocabulary
    plain = model if model.seed is None else dataclasses.replace(model, seed=None)
    branches = branches_of(trial)
    sequences, heads = trained_sequences(trial), heads_of(trial)
    tensors, taps, shape = _places(plain, train, sequences, vocabulary, branches, heads)
    rates = cache(lambda: rates_of(trial))  # of no use to most faults
    return Facts(
        trial.steps,
        tensors,
        taps,
        seed=trial.seeds["fault"],
        optimizer=trial.optim.name,
        slots=OPTIMIZERS[trial.optim.name].slots,
        precision=train.precision,
        has_loss_scale=train.loss_scaling != "none",
        keeps_scores=model.explicit_attention,
        ranks=train.ranks,
        batch=train.batch,
        context=model.context,
        warmup=warmup_steps(trial),
        peak=trial.optim.lr,
        rate=lambda step: float(rates()[step]),
        tokens=tokens,
        token_counts=token_counts,
        shape=shape,
        routes={} if train.checkpointing else route_shapes(model, sequences, branches),  # else chosen again
        experts=max(branch.destinations for branch in branches),
        buffers=RouterBias.shapes(trial),
        **_of_policy(trial),
    )


def _of_policy(trial: Trial) -> dict[str, Any]:
    if trial.objective.name != "policy":
        return {}
    options, length = trial.section("policy"), trial.model.context + 1
    tokens = length - prompt_tokens(trial) if options.critic else 1
    return {"completions": trial.train.batch, "advantages": tokens, "updates": options.updates}


@lru_cache(maxsize=64)
def _places(
    model: Model, train: Train, sequences: int, vocabulary: int, branches: Branches, heads: tuple[ModelTensor, ...]
) -> tuple[Shapes, Shapes, dict[str, Any]]:
    """The tensors and the activations, with their shapes, and what records keep; fused attention keeps no scores."""
    taps, kept = struck_shapes(model, sequences, vocabulary, branches), model.explicit_attention
    rows = tensor_table(model, vocabulary, branches=branches, heads=heads)
    tensors = {row.name: row.shape for row in rows}
    taps = {name: shape for name, shape in taps.items() if kept or not name.endswith(".scores")}
    return tensors, taps, shape_of(model, train, branches)


def shape_of(model: Model, train: Train, branches: Branches) -> dict[str, Any]:
    """What decides which addresses a trial has, and what stands there."""
    structure = {f"model.{name}": value for name, value in vars(model).items() if name not in ("seed", "start")}
    for branch in branches:
        own = vars(branch.options) if branch.options else {}
        structure |= {
            f"{branch.kind}.{name}": x
            for name, x in own.items()
            if scope_of(type(branch.options), name) == "structural"
        }
    return structure | {f"train.{name}": getattr(train, name) for name in ("batch", "ranks", "precision")}
