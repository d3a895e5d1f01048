"""The parametrisation: one row per tensor with its shape, initial size and learning-rate multiplier.

Rows come in the order in which the optimizer wants them: tensors with the same multipliers stand side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config import Model


@dataclass(frozen=True)
class TensorRow:
    """One named tensor of the model.

    `shape` is [out, in] for matrices, as in torch.nn.Linear. It starts at `mean`, plus noise of size `std`. A `stacked`
    matrix stands right behind the one before it, because the model reads both as one.
    """

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    learning_rate: float = 1.0
    decay: bool = True
    stacked: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def tensor_table(model: Model, vocabulary: int) -> list[TensorRow]:
    """Every tensor of the model, embeddings first, then hidden matrices, head and gains.

    Standard: embedding std 1/sqrt(d), matrices 1/sqrt(fan_in), one learning rate (Wortsman et al. 2023, section 2).
    muP, with m = width / base_width (Yang et al. 2022, arXiv 2203.03466, table 8): the embedding keeps the size that
    it has at the base width, hidden matrices learn at lr / m, and the head's output is multiplied by 1/m
    (`output_multiplier`). At width = base_width that is the standard parametrisation but for the head, which starts at
    zero in muP, as microsoft/mup recommends: random logits shrink as 1/sqrt(m) beside what training adds to them.
    """
    d, hidden = model.width, feedforward_size(model)
    mup = model.parametrization == "mup"
    vector_std = 1 / math.sqrt(model.base_width if mup else d)
    hidden_rate = model.base_width / d if mup else 1.0

    rows = [TensorRow("embedding", (vocabulary, d), vector_std)]
    if model.positions == "learned":
        rows.append(TensorRow("positions", (model.context, d), vector_std))
    for i in range(model.depth):
        block = f"blocks.{i}"
        matrices = {"attention.query": (d, d), "attention.key": (d, d), "attention.value": (d, d)}
        matrices["attention.projection"] = (d, d)
        stacked = {"attention.key", "attention.value"}
        if model.activation == "swiglu":
            matrices["feedforward.gate"] = (hidden, d)
            stacked.add("feedforward.up")
        matrices |= {"feedforward.up": (hidden, d), "feedforward.down": (d, hidden)}
        for name, shape in matrices.items():
            std = 1 / math.sqrt(shape[1])
            rows.append(TensorRow(f"{block}.{name}", shape, std, 0.0, hidden_rate, stacked=name in stacked))
    rows.append(TensorRow("head", (vocabulary, d), 0.0 if mup else vector_std))
    for i in range(model.depth):
        gains = {"attention_norm": d, "feedforward_norm": d}
        if model.qk_norm:
            gains |= {"attention.query_norm": model.head_dim, "attention.key_norm": model.head_dim}
        rows += [_gain(f"blocks.{i}.{name}", size) for name, size in gains.items()]
    rows.append(_gain("final_norm", d))
    return rows


def _gain(name: str, size: int) -> TensorRow:
    return TensorRow(name, (size,), std=0.0, mean=1.0, decay=False)


def feedforward_size(model: Model) -> int:
    """Hidden size of the feed-forward part."""
    return model.feedforward or 4 * model.width


def attention_multiplier(model: Model) -> float:
    """What query-key products are multiplied by: 1/sqrt(head_dim), or for muP sqrt(base_head_dim)/head_dim."""
    if model.parametrization == "standard":
        return 1 / math.sqrt(model.head_dim)
    return math.sqrt(model.base_head_dim or model.head_dim) / model.head_dim


def output_multiplier(model: Model) -> float:
    """What the head's output is multiplied by: 1, or for muP base_width/width."""
    return model.base_width / model.width if model.parametrization == "mup" else 1.0
