"""Which tensors a model has: their names, shapes and kinds, in the order in which the flat weights hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from harness.config import Model


class Kind(StrEnum):
    """What a tensor does, which decides how it starts and how fast it learns."""

    EMBEDDING = "embedding"  # [vocabulary or positions, width]: a vector for each
    HIDDEN = "hidden"  # [out, in], inside a block
    RESIDUAL = "residual"  # [out, in], the last matrix of a branch: what it gives is added to the residual stream
    HEAD = "head"  # [vocabulary, width]
    GAIN = "gain"  # [features], of a norm inside a block
    FINAL_GAIN = "final_gain"  # [features], of a norm outside of the blocks


@dataclass(frozen=True)
class ModelTensor:
    """One named tensor. `shape` is [out, in] for matrices, as in torch.nn.Linear.

    A `stacked` matrix stands right behind the one before it, because the model reads both as one.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    stacked: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def model_tensors(model: Model, vocabulary: int) -> Iterator[ModelTensor]:
    """Embeddings first, then hidden matrices, head and gains: tensors with the same multipliers stand side by side."""
    d = model.width
    yield ModelTensor("embedding", (vocabulary, d), Kind.EMBEDDING)
    if model.positions == "learned":
        yield ModelTensor("positions", (model.context, d), Kind.EMBEDDING)
    for i in range(model.depth):
        yield from _matrices(model, f"blocks.{i}")
    yield ModelTensor("head", (vocabulary, d), Kind.HEAD)
    for i in range(model.depth):
        yield from _gains(model, f"blocks.{i}")
    yield ModelTensor("final_norm", (d,), Kind.FINAL_GAIN)


def _matrices(model: Model, block: str) -> Iterator[ModelTensor]:
    d, hidden, is_gated = model.width, feedforward_size(model), model.activation == "swiglu"
    yield ModelTensor(f"{block}.attention.query", (d, d), Kind.HIDDEN)
    yield ModelTensor(f"{block}.attention.key", (d, d), Kind.HIDDEN, stacked=True)
    yield ModelTensor(f"{block}.attention.value", (d, d), Kind.HIDDEN, stacked=True)
    yield ModelTensor(f"{block}.attention.projection", (d, d), Kind.RESIDUAL)
    if is_gated:
        yield ModelTensor(f"{block}.feedforward.gate", (hidden, d), Kind.HIDDEN)
    yield ModelTensor(f"{block}.feedforward.up", (hidden, d), Kind.HIDDEN, stacked=is_gated)
    yield ModelTensor(f"{block}.feedforward.down", (d, hidden), Kind.RESIDUAL)


def _gains(model: Model, block: str) -> Iterator[ModelTensor]:
    yield ModelTensor(f"{block}.attention_norm", (model.width,), Kind.GAIN)
    yield ModelTensor(f"{block}.feedforward_norm", (model.width,), Kind.GAIN)
    if model.qk_norm:
        yield ModelTensor(f"{block}.attention.query_norm", (model.head_dim,), Kind.GAIN)
        yield ModelTensor(f"{block}.attention.key_norm", (model.head_dim,), Kind.GAIN)


def feedforward_size(model: Model) -> int:
    """Hidden size of the feed-forward part."""
    return model.feedforward or 4 * model.width
