"""What a forward pass offers to the parts of a model: layers that know their tensors, strengths and taps by name.

A norm, gain, shift or bias whose tensor the configuration gives to the model (harness/model/outline.py) is applied;
one without a tensor is not there, and x passes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from harness.config import Model, Trial
from harness.model.dropout import Streams, dropped
from harness.model.key_values import KeyValues
from harness.model.layers import DYNAMIC_TANH, NORMS, Leaf, linear, norm_beside, scaled, shifted
from harness.model.parameters import Layout
from harness.model.precision import Precision
from harness.model.sigma import SingularVectors, reparametrised
from harness.model.taps import RowTaps

Notices = Callable[[str, Tensor, slice], None]


class Biases(Protocol):
    """What routers add to scores before they choose (harness/optim/router_bias.py)."""

    def of(self, layer: int, rows: slice) -> Tensor:
        """Those of a layer's experts in these rows, [r, 1, E]."""


class ExpertRoutes(Protocol):
    """Experts that were chosen before (harness/training/stale_routing.py)."""

    def routed(
        self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Experts [r, n, K] in the place of those of the current weights, which tokens go by old ones, and with what.

        The second is [r, n, 1], None for no token; the third [r, n, K], None for the scores that experts have now.
        """

    def see(self, layer: int, rows: slice, sequences: range, choice_rxnxK: Tensor, weights_rxnxK: Tensor) -> None:
        """Experts and weights of these tokens as they are now."""


@dataclass(frozen=True)
class Part:
    """Rows that pass through the model together, and what has been looked up for them: weights, gradients [r, P]."""

    rows: slice
    trials: Sequence[Trial]
    weights: Tensor
    gradients: Tensor
    leaves: dict[tuple[str, str | None], Leaf] = field(default_factory=dict)
    strengths: dict[tuple[str, int], Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Tools:
    """The same for all parts of a model, in one pass: that of the rows of `part`, `at` their steps, [r].

    `sequences` are the numbers of its sequences in the batch, `tokens` [r, B, T] what they hold. `vectors` are there
    where hidden matrices are reparametrised. `notices` are told what acted: a key, where [r], and in which rows.
    `losses` are added to the loss. With `key_values` the pass goes on from the tokens that were read before.
    """

    config: Model
    layout: Layout
    precision: Precision
    vectors: SingularVectors | None
    notices: Notices
    part: Part
    at: Tensor
    streams: Streams
    sequences: range
    taps: RowTaps
    tokens: Tensor | None = None
    router_bias: Biases | None = None
    routes: ExpertRoutes | None = None
    losses: list[Tensor] = field(default_factory=list)
    key_values: KeyValues | None = None

    def lose(self, loss_r: Tensor) -> None:
        """This is differentiated beside the loss, [r], and is no part of what is reported."""
        self.losses.append(loss_r)

    def notice(self, part: str, acted_r: Tensor) -> None:
        """Something acted in this pass in these rows of it."""
        self.notices(part, acted_r, self.part.rows)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self.part.weights.dtype

    # --- what belongs to the trials of the part ----------------------------------------------------------------------

    def strength(self, name: str, dims: int, read: Callable[[Trial], float] | None = None) -> Tensor:
        """What is read of each trial, by default that field of its model: [r, 1, ...] of so many dims."""
        key, part = (name, dims), self.part
        if key not in part.strengths:
            values = [read(trial) if read else getattr(trial.model, name) for trial in part.trials]
            column = torch.tensor(values, dtype=torch.float64).to(part.weights)
            part.strengths[key] = column.view(-1, *[1] * (dims - 1))
        return part.strengths[key]

    def switched(self, name: str, dims: int) -> Tensor | None:
        """The same of a field that may be null, and is then null in every trial."""
        return None if getattr(self.config, name) is None else self.strength(name, dims)

    def leaf(self, first: str, last: str | None = None) -> Leaf:
        """The tensor, or the stack of neighbouring matrices, under its name."""
        key, part = (first, last), self.part
        if key not in part.leaves:
            views = (self.layout.view(flat, first, last) for flat in (part.weights, part.gradients))
            part.leaves[key] = Leaf(*views)
        return part.leaves[key]

    # --- small parts -------------------------------------------------------------------------------------------------

    def linear(self, x_RxNxI: Tensor, first: str, last: str | None = None, by_channel: bool = False) -> Tensor:
        """x through the matrix `first`, or those up to `last` side by side, with all that is asked for around them.

        `by_channel`: see `layers.linear`.
        """
        x, leaf = self.shifted(f"{first}_shift", x_RxNxI), self.leaf(first, last)
        is_biased = f"{first}_bias" in self.layout.by_name
        bias = self.leaf(f"{first}_bias", f"{last}_bias" if last else None) if is_biased else None
        if self.vectors and f"{first}_scale" in self.layout.by_name:
            gamma = self.leaf(f"{first}_scale", f"{last}_scale" if last else None)
            x, leaf = reparametrised(x, leaf, gamma, *self.vectors.stack(first, last, self.part.rows))
        return linear(x, leaf, self.precision, bias, by_channel)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """x through the norm of these gains."""
        if name not in self.layout.by_name:
            return x
        norm, leaf, held = NORMS[self.config.norm], self.leaf(name), self.precision.norm
        gain = Leaf(held(leaf.weight).to(leaf.weight.dtype), leaf.gradient)
        slope = [self.leaf(f"{name}_alpha")] if self.config.norm == DYNAMIC_TANH else []
        normed = norm(held(x), gain, self.config.norm_epsilon, *slope)
        return held(self.shifted(f"{name}_bias", normed, held))

    def norm_beside(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """x for its other use, and x through the norm: the bits of `norm`, and a pass less where that is a program."""
        if name not in self.layout.by_name or self.precision.norms or self.config.norm == DYNAMIC_TANH:
            return x, self.norm(name, x)
        x, normed = norm_beside(self.config.norm, x, self.leaf(name), self.config.norm_epsilon)
        return x, self.shifted(f"{name}_bias", normed)

    def scaled(self, name: str, x: Tensor) -> Tensor:
        """x times a learned gain or number."""
        return scaled(x, self.leaf(name)) if name in self.layout.by_name else x

    def shifted(self, name: str, x: Tensor, held: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """x plus a learned bias or number, which is `held` in a format first."""
        if name not in self.layout.by_name:
            return x
        leaf = self.leaf(name)
        return shifted(x, Leaf(held(leaf.weight).to(leaf.weight.dtype), leaf.gradient))

    def dropped(self, name: str, x_RxNxxx: Tensor) -> Tensor:
        """x, of whose N sequences or tokens parts are dropped in training."""
        shares = self.switched("dropout", 1)
        if shares is None or not torch.is_grad_enabled():
            return x_RxNxxx
        return dropped(x_RxNxxx, shares, self.streams.at(name)[self.part.rows], self.sequences)

    def tap(self, name: str, x: Tensor) -> Tensor:
        """A tap on what matrix products read or leave: whatever is written there is held in their precision too."""
        return self.precision(self.taps(name, x)) if name in self.taps else x
