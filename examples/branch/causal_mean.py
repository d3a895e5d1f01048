"""A mixer without attention: a token is given the mean of the tokens up to it, through a gate of its own.

    y_t = W_projection (silu(W_gate x_t) * m_t),   m_t = sum_s keep^(t - s) W_value x_s / sum_s keep^(t - s)

over the last `window` tokens s, t itself among them. With all of them and keep = 1 the mean is that of the average
attention network (Zhang et al. 2018, arXiv 1805.00631).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from harness.config import PER_TRIAL, STRUCTURAL, Trial, number
from harness.model.branches.base import Branch
from harness.model.layers import silu
from harness.model.products import differentiable_product
from harness.model.tensors import Kind, ModelTensor
from harness.model.tools import Tools


@dataclass(frozen=True)
class Options:
    """The section `causal_mean` of the recipe."""

    window: int | None = number(STRUCTURAL, None, "last tokens that the mean is taken over; null: all", low=1)
    keep: float = number(PER_TRIAL, 1.0, "weight of a token beside that of the next one", above=0, high=1)


@lru_cache(maxsize=256)
def shares(keep: float, window: int | None, context: int) -> Tensor:
    """[T, T]: what each token, a row, takes of the others; in float64."""
    position = torch.arange(context)
    back = position[:, None] - position
    weight = torch.where((back >= 0) & (back < (window or context)), keep ** back.clamp(min=0).double(), 0.0)
    return weight / weight.sum(1, keepdim=True)


@dataclass(frozen=True)
class CausalMean(Branch):
    """The kind is named by its file, and so are its tensors: `blocks.0.causal_mean.gate`."""

    def tensors(self) -> Iterator[ModelTensor]:
        d = self.model.width
        yield ModelTensor("gate", (d, d), Kind.HIDDEN)
        yield ModelTensor("value", (d, d), Kind.HIDDEN, stacked=True)
        yield ModelTensor("projection", (d, d), Kind.RESIDUAL)
        if self.model.init == "fixup":
            for name in ("gate_shift", "activation_shift", "projection_shift"):
                yield ModelTensor(name, (1,), Kind.SHIFT)

    def taps(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(("value", "mean", "projection"), (sequences * self.model.context, self.model.width))

    def kept(self) -> int:
        """Input, gate and value, both once more as they are multiplied, the mean, their product; and shares."""
        return (7 + (self.model.init == "fixup")) * self.model.width + self.model.context

    def operations(self) -> int:
        return self.model.context * self.model.width

    def refused(self, trial: Trial) -> Iterator[str]:
        window, context = self.options.window, self.model.context
        if window is not None and window > context:
            why = f"longer than model.context={context}"
            yield f"causal_mean.window={window}: {why}; allowed: 1 to {context} or null"

    def __call__(self, tools: Tools, name: str, x_RxNxD: Tensor, context: int) -> Tensor:
        precision = tools.precision
        gate, value = tools.linear(x_RxNxD, f"{name}.gate", f"{name}.value").chunk(2, -1)
        gate = precision(silu(tools.shifted(f"{name}.activation_shift", gate)))
        mean = self._mean(tools, tools.tap(f"{name}.value", value), context)
        projection = tools.linear(gate * tools.tap(f"{name}.mean", mean), f"{name}.projection")
        return tools.tap(f"{name}.projection", projection)

    def _mean(self, tools: Tools, value_RxNxD: Tensor, context: int) -> Tensor:
        """One product for each trial, in which all sequences stand side by side."""
        keeps = [trial.section(self.kind).keep for trial in tools.part.trials]
        taken = torch.stack([shares(keep, self.options.window, context) for keep in keeps]).to(value_RxNxD)
        side_by_side = value_RxNxD.unflatten(1, (-1, context)).transpose(1, 2)
        mean = differentiable_product(tools.precision(taken), side_by_side.flatten(2), tools.precision.tf32)
        return tools.precision(mean.view(side_by_side.shape).transpose(1, 2).flatten(1, 2))
