"""The parametrisation: one row per tensor with its shape, initial size and learning-rate multiplier.

Rows come in the order in which the optimizer wants them: tensors with the same multipliers stand side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config import Model
from harness.tensors import Kind, ModelTensor, model_tensors

INITS = ("standard", "small", "scaled_residual", "small_scaled", "zero_residual", "fixup")


@dataclass(frozen=True)
class TensorRow:
    """One tensor's row of the table: it starts at `mean`, plus noise of size `std`; the others multiply what the
    configuration says for all of them.
    """

    tensor: ModelTensor
    std: float
    mean: float = 0.0
    learning_rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def stacked(self) -> bool:
        return self.tensor.stacked

    @property
    def size(self) -> int:
        return self.tensor.size


def tensor_table(model: Model, vocabulary: int, rule: str = "adam") -> list[TensorRow]:
    """Every tensor of the model, embeddings first, then hidden matrices, head and gains.

    Standard: embedding std 1/sqrt(d), matrices 1/sqrt(fan_in), one learning rate (Wortsman et al. 2023, section 2).
    muP, with m = width / base_width (Yang et al. 2022, arXiv 2203.03466, table 8): the embedding keeps the size that
    it has at the base width, hidden matrices learn at lr / m, and the head's output is multiplied by 1/m
    (`output_multiplier`). At width = base_width that is the standard parametrisation but for the head, which starts at
    zero in muP, as microsoft/mup recommends: random logits shrink as 1/sqrt(m) beside what training adds to them.
    """
    mup = model.parametrization == "mup"
    vector_std = 1 / math.sqrt(model.base_width if mup else model.width)
    hidden_rate = model.base_width / model.width if mup else 1.0

    def row(tensor: ModelTensor) -> TensorRow:
        match tensor.kind:
            case Kind.EMBEDDING:
                return TensorRow(tensor, std=vector_std)
            case Kind.HEAD:
                return TensorRow(tensor, std=0.0 if mup else vector_std)
            case Kind.HIDDEN | Kind.RESIDUAL:
                return TensorRow(tensor, std=1 / math.sqrt(tensor.shape[1]), learning_rate=hidden_rate)
            case _:
                return TensorRow(tensor, std=0.0, mean=1.0, decay=0.0)

    return [row(tensor) for tensor in model_tensors(model, vocabulary)]


def attention_multiplier(model: Model) -> float:
    """What query-key products are multiplied by: 1/sqrt(head_dim), or for muP sqrt(base_head_dim)/head_dim."""
    if model.parametrization == "standard":
        return 1 / math.sqrt(model.head_dim)
    return math.sqrt(model.base_head_dim or model.head_dim) / model.head_dim


def output_multiplier(model: Model) -> float:
    """What the head's output is multiplied by: 1, or for muP base_width/width."""
    return model.base_width / model.width if model.parametrization == "mup" else 1.0
