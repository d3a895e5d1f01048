"""The feed-forward part, with or without a gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Model, Trial, shown
from harness.model.branches.base import Branch
from harness.model.layers import ACTIVATIONS, Activation, clamp_swiglu, is_beyond, kept_by_norms
from harness.model.tensors import Kind, ModelTensor
from harness.model.tools import Tools

SWIGLU_CLAMP = "model.swiglu_clamp"  # the part of a recipe that is counted under this key


@dataclass(frozen=True)
class Feedforward(Branch):
    """Each token for itself through a matrix, a non-linearity and another matrix (Vaswani et al. 2017)."""

    fields: ClassVar = (
        "feedforward",
        "expansion",
        "activation",
        "swiglu_clamp",
        "smooth_swiglu",
        "feedforward_norm",
        "up_norm",
        "down_norm",
    )

    @property
    def is_normed(self) -> bool:
        return self.model.feedforward_norm

    @property
    def activation(self) -> Activation:
        return ACTIVATIONS[self.model.activation]

    def tensors(self) -> Iterator[ModelTensor]:
        c, d, hidden, is_gated = self.model, self.model.width, feedforward_size(self.model), self.activation.gated
        if is_gated:
            yield ModelTensor("gate", (hidden, d), Kind.HIDDEN)
        yield ModelTensor("up", (hidden, d), Kind.HIDDEN, stacked=is_gated)
        yield ModelTensor("down", (d, hidden), Kind.RESIDUAL)
        if c.up_norm:
            for name in ("gate_norm", "up_norm") if is_gated else ("up_norm",):
                yield ModelTensor(name, (hidden,), Kind.GAIN)
        if c.down_norm:
            yield ModelTensor("down_norm", (d,), Kind.GAIN)
        if c.hypersphere:
            for name in ("gate_factor", "up_factor") if is_gated else ("up_factor",):
                yield ModelTensor(name, (hidden,), Kind.SPHERE_UP)
        if c.init == "fixup":
            for name in ("gate" if is_gated else "up", "activation", "down"):
                yield ModelTensor(f"{name}_shift", (1,), Kind.SHIFT)

    def taps(self, sequences: int) -> Mapping[str, tuple[int, ...]]:
        tokens = sequences * self.model.context
        return {"up": (tokens, feedforward_size(self.model)), "down": (tokens, self.model.width)}

    def kept(self) -> int:
        c, hidden = self.model, feedforward_size(self.model)
        gated = 4 + 2 * (c.swiglu_clamp is not None) + (c.init == "fixup")
        plain = 1 if c.activation == "relu" else 2  # a ReLU keeps what it gives, as the next matrix does
        gated, plain = gated + 2 * c.hypersphere, plain + c.hypersphere
        fed = c.up_norm * (1 + self.activation.gated) * hidden + c.down_norm * c.width
        return c.width + (gated if self.activation.gated else plain) * hidden + kept_by_norms(c, fed)

    def refused(self, trial: Trial) -> Iterator[str]:
        yield from refused_without_gate(self.model)

    def idle(self, trial: Trial) -> Iterator[tuple[str, str]]:
        yield from idle_without_fp8(trial)

    def parts(self, trial: Trial) -> Iterator[str]:
        if trial.model.swiglu_clamp is not None:
            yield SWIGLU_CLAMP

    def __call__(self, tools: Tools, name: str, x_RxNxD: Tensor, context: int) -> Tensor:
        activation, precision = self.activation, tools.precision
        if activation.gated:
            gate, up = tools.linear(x_RxNxD, f"{name}.gate", f"{name}.up").chunk(2, -1)
            gate = tools.shifted(f"{name}.activation_shift", tools.norm(f"{name}.gate_norm", gate))
            up = tools.norm(f"{name}.up_norm", tools.tap(f"{name}.up", up))
            gate, up = self._on_sphere(tools, f"{name}.gate", gate), self._on_sphere(tools, f"{name}.up", up)
            bound = tools.switched("swiglu_clamp", 3)
            if bound is not None:
                if torch.is_grad_enabled():  # validation is not part of the step
                    tools.notice(SWIGLU_CLAMP, is_beyond(gate, up, precision(bound)))
                gate, up = clamp_swiglu(gate, up, precision(bound))
            hidden = precision(activation.function(gate)) * up
        else:
            up = tools.norm(f"{name}.up_norm", tools.tap(f"{name}.up", tools.linear(x_RxNxD, f"{name}.up")))
            up = self._on_sphere(tools, f"{name}.up", up)
            hidden = activation.function(tools.shifted(f"{name}.activation_shift", up))
        down = tools.tap(f"{name}.down", tools.linear(hidden, f"{name}.down", by_channel=self.model.smooth_swiglu))
        return tools.norm(f"{name}.down_norm", down)

    def _on_sphere(self, tools: Tools, name: str, x: Tensor) -> Tensor:
        """On the hypersphere, where products with unit vectors are small: times sqrt(width) and a learned factor."""
        if not self.model.hypersphere:
            return x
        return tools.precision(tools.scaled(f"{name}_factor", x) * self.model.width**0.5)


def refused_without_gate(model: Model) -> Iterator[str]:
    """What asks for SwiGLU's two branches where the activation has one, each a line."""
    if ACTIVATIONS[model.activation].gated:
        return
    gated = ", ".join(name for name, activation in ACTIVATIONS.items() if activation.gated)
    asked = {"swiglu_clamp": (model.swiglu_clamp, "null"), "smooth_swiglu": (model.smooth_swiglu or None, "false")}
    for name, (value, off) in asked.items():
        if value is not None:
            why = f"model.activation={model.activation} has no gate"
            yield f"model.{name}={shown(value)}: {why}; allowed: {off}, or model.activation={gated}"


def idle_without_fp8(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of Smooth-SwiGLU where nothing is rounded to 8 bits (Fishman et al. 2024, arXiv 2409.12517)."""
    if trial.model.smooth_swiglu and trial.train.precision != "fp8":
        why = f"train.precision={trial.train.precision} rounds nothing to 8 bits"
        yield "model.smooth_swiglu", f"model.smooth_swiglu=true: {why}; it takes train.precision=fp8"


def feedforward_size(model: Model) -> int:
    """Hidden size of the feed-forward part.

    With a gate there are three matrices in place of two, so it is 8/3 of the width in place of 4 (Shazeer 2020, arXiv
    2002.05202, section 3), rounded to a multiple of 8, 4 or 2 where that changes it by less than 1%.
    """
    if model.feedforward is not None:
        return model.feedforward
    is_gated = ACTIVATIONS[model.activation].gated
    wanted = model.width * (model.expansion if model.expansion is not None else 8 / 3 if is_gated else 4)
    if wanted == round(wanted):
        return max(1, round(wanted))
    near = (multiple * round(wanted / multiple) for multiple in (8, 4, 2, 1))
    return next((size for size in near if abs(size - wanted) <= 0.009 * wanted), max(1, round(wanted)))
