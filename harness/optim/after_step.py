"""What is done to a row right after its optimizer has stepped, besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from harness.config import Trial
from harness.model.gpt import GPT
from harness.model.parameters import Layout
from harness.model.state import Rows, State
from harness.optim.qk_clip import QKClip
from harness.optim.router_bias import RouterBias
from harness.optim.unit_rows import UnitRows

AfterStep = QKClip | RouterBias | UnitRows


def after_step(trials: Sequence[Trial], model: GPT, layout: Layout, weights: Rows, state: State) -> list[AfterStep]:
    """What some of these trials ask for. They read through the model's taps, and routers take their biases from it."""
    first, made = trials[0], list[AfterStep]()
    if first.model.hypersphere:
        made.append(UnitRows(layout, weights))
    if QKClip.is_on(first):
        made.append(QKClip(first.model, layout, weights, model.taps))
    if any(RouterBias.is_on(trial) for trial in trials):
        experts = first.section("moe").experts
        model.router_bias = RouterBias(first.model, experts, state, weights.used, model.taps)
        made.append(model.router_bias)
    return made


def buffers_of(model: GPT, row: int) -> Mapping[str, Tensor]:
    """Views of what the model of a row keeps and no gradient trains, by name."""
    bias = model.router_bias
    return bias.buffers(row) if isinstance(bias, RouterBias) else {}
