"""Which tensors a model has: their names, shapes and kinds, in the order in which the flat weights hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from harness.config import Model
from harness.model.activations import ACTIVATIONS
from harness.model.placements import has_final_norm, placement_of


class Kind(StrEnum):
    """What a tensor does, which decides how it starts and how fast it learns."""

    EMBEDDING = "embedding"  # [vocabulary or positions, width]: a vector for each
    HIDDEN = "hidden"  # [out, in], inside a block
    RESIDUAL = "residual"  # [out, in], the last matrix of a branch: what it gives is added to the residual stream
    HEAD = "head"  # [vocabulary, width]
    GAIN = "gain"  # [features], of a norm inside a block, or a row of them for each of several norms side by side
    FINAL_GAIN = "final_gain"  # [features], of a norm outside of the blocks
    LAYER_SCALE = "layer_scale"  # [width], a gain on what a branch gives, which starts at the trial's model.layer_scale
    SCALE = "scale"  # [1], a learned factor that starts at one
    SHIFT = "shift"  # [1], a learned summand that starts at zero
    BIAS = "bias"  # [features], a learned summand of a linear layer or norm inside a block, which starts at zero
    FINAL_BIAS = "final_bias"  # [features], of a norm outside of the blocks


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
    """Embeddings first, then hidden matrices, head, gains and single numbers: equal multipliers stand side by side."""
    d = model.width
    yield ModelTensor("embedding", (vocabulary, d), Kind.EMBEDDING)
    if model.positions == "learned":
        yield ModelTensor("positions", (model.context, d), Kind.EMBEDDING)
    for i in range(model.depth):
        yield from _matrices(model, f"blocks.{i}")
    if not model.tied_head:
        yield ModelTensor("head", (vocabulary, d), Kind.HEAD)
    for i in range(model.depth):
        yield from block_norms(model, i)
    outer = {"embedding_norm": model.embedding_norm, "final_norm": has_final_norm(model)}
    for name in (name for name, is_there in outer.items() if is_there):
        yield ModelTensor(name, (d,), Kind.FINAL_GAIN)
    if model.biases:
        yield from _biases(model)
        for name in (name for name, is_there in outer.items() if is_there and has_norm_biases(model)):
            yield ModelTensor(f"{name}_bias", (d,), Kind.FINAL_BIAS)
    if model.layer_scale is not None:
        for name in _branches(model):
            yield ModelTensor(f"{name}.layer_scale", (d,), Kind.LAYER_SCALE)
    if model.sigma_reparam:
        for i in range(model.depth):
            for matrix in _matrices(model, f"blocks.{i}"):
                yield ModelTensor(f"{matrix.name}_scale", (1,), Kind.SCALE, matrix.stacked)
    if model.init == "fixup":
        yield from _fixup(model)


def _branches(model: Model) -> Iterator[str]:
    return (f"blocks.{i}.{part}" for i in range(model.depth) for part in ("attention", "feedforward"))


def _matrices(model: Model, block: str) -> Iterator[ModelTensor]:
    d, hidden, is_gated = model.width, feedforward_size(model), ACTIVATIONS[model.activation].gated
    yield ModelTensor(f"{block}.attention.query", (d, d), Kind.HIDDEN)
    yield ModelTensor(f"{block}.attention.key", (d, d), Kind.HIDDEN, stacked=True)
    yield ModelTensor(f"{block}.attention.value", (d, d), Kind.HIDDEN, stacked=True)
    yield ModelTensor(f"{block}.attention.projection", (d, d), Kind.RESIDUAL)
    if is_gated:
        yield ModelTensor(f"{block}.feedforward.gate", (hidden, d), Kind.HIDDEN)
    yield ModelTensor(f"{block}.feedforward.up", (hidden, d), Kind.HIDDEN, stacked=is_gated)
    yield ModelTensor(f"{block}.feedforward.down", (d, hidden), Kind.RESIDUAL)


def block_norms(model: Model, number: int) -> Iterator[ModelTensor]:
    """The gains of one block's norms: those of its placement, then those that have a switch of their own."""
    block, at = f"blocks.{number}", placement_of(model, number)
    d, hidden, heads = model.width, feedforward_size(model), model.width // model.head_dim
    of_head = (model.head_dim,) if model.qk_norm_shared else (heads, model.head_dim)
    of_qk = of_head if model.qk_norm_over == "head" else (d,)
    norms: dict[str, tuple[bool, tuple[int, ...]]] = {
        "attention_norm": (at.before and model.attention_norm, (d,)),
        "attention_output_norm": (at.on_branch, (d,)),
        "attention_sum_norm": (at.after, (d,)),
        "feedforward_norm": (at.before and model.feedforward_norm, (d,)),
        "feedforward_output_norm": (at.on_branch, (d,)),
        "feedforward_sum_norm": (at.after, (d,)),
        "attention.qkv_norm": (model.qkv_norm, (3, d)),
        "attention.query_norm": (model.qk_norm, of_qk),
        "attention.key_norm": (model.qk_norm, of_qk),
        "attention.projection_norm": (model.projection_norm, (d,)),
        "feedforward.gate_norm": (model.up_norm and ACTIVATIONS[model.activation].gated, (hidden,)),
        "feedforward.up_norm": (model.up_norm, (hidden,)),
        "feedforward.down_norm": (model.down_norm, (d,)),
    }
    for name, (is_there, shape) in norms.items():
        if is_there:
            yield ModelTensor(f"{block}.{name}", shape, Kind.GAIN)


def has_norm_biases(model: Model) -> bool:
    """Whether norms have a bias: LayerNorms do where linear layers do (GPT-2), RMSNorms never."""
    return model.biases and model.norm == "layer"


def _biases(model: Model) -> Iterator[ModelTensor]:
    """Those of the blocks: of each matrix, which the model reads together where it does so with the matrices, and norm.

    As in GPT-2 (Radford et al. 2019), whose head has none.
    """
    for i in range(model.depth):
        for matrix in _matrices(model, f"blocks.{i}"):
            yield ModelTensor(f"{matrix.name}_bias", matrix.shape[:1], Kind.BIAS, matrix.stacked)
        if has_norm_biases(model):
            for norm in block_norms(model, i):
                yield ModelTensor(f"{norm.name}_bias", norm.shape, Kind.BIAS)


def _fixup(model: Model) -> Iterator[ModelTensor]:
    """A factor for each branch, and a summand before each linear layer and each non-linearity.

    Zhang et al. 2019 (arXiv 1901.09321), section 3.2, rule 3. Matrices that the model reads as one are one layer.
    """
    first = "gate" if ACTIVATIONS[model.activation].gated else "up"
    places = {"attention": ("query", "projection"), "feedforward": (first, "activation", "down")}
    for name in _branches(model):
        yield ModelTensor(f"{name}.multiplier", (1,), Kind.SCALE)
    for name in _branches(model):
        for place in places[name.rpartition(".")[2]]:
            yield ModelTensor(f"{name}.{place}_shift", (1,), Kind.SHIFT)
    yield ModelTensor("head_shift", (1,), Kind.SHIFT)


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
