"""What a whole model consists of: its tensors, in the order in which the flat weights hold them, and its taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.config import Model, Trial
from harness.model.branches import Branches, branches_of
from harness.model.hyper_connections import head_mixers, mixers
from harness.model.layers import DYNAMIC_TANH
from harness.model.placements import has_final_norm, placement_of
from harness.model.tensors import MATRICES, Kind, ModelTensor


def model_tensors(model: Model, vocabulary: int, branches: Branches = ()) -> Iterator[ModelTensor]:
    """Embeddings first, then hidden matrices, head, gains and single numbers: equal multipliers stand side by side.

    No `branches`: the usual ones.
    """
    d, branches = model.width, branches or branches_of(Trial(model))
    inside = [list(_of_block(model, i, branches)) for i in range(model.depth)]
    blocks = [f"blocks.{i}.{branch.at(i).kind}" for i in range(model.depth) for branch in branches]
    matrices = [[tensor for tensor in block if tensor.kind in MATRICES] for block in inside]
    shifts = [tensor for block in inside for tensor in block if tensor.kind == Kind.SHIFT]
    gains = [[tensor for tensor in block if tensor.kind not in (*MATRICES, Kind.SHIFT)] for block in inside]
    yield ModelTensor("embedding", (vocabulary, d), Kind.EMBEDDING)
    if model.positions == "learned":
        yield ModelTensor("positions", (model.context, d), Kind.EMBEDDING)
    yield from (tensor for block in matrices for tensor in block)
    if not model.tied_head:
        yield ModelTensor("head", (vocabulary, d), Kind.HEAD)
    yield from (tensor for block in gains for tensor in block)
    is_there = {"embedding_norm": model.embedding_norm, "final_norm": has_final_norm(model)}
    outer = [name for name in is_there if is_there[name]]
    yield from (ModelTensor(name, (d,), Kind.FINAL_GAIN) for name in outer)
    yield from head_mixers(model)
    norms = [[tensor for tensor in block if tensor.kind == Kind.GAIN] for block in gains]
    norms_too = model.norm == DYNAMIC_TANH or (model.biases and model.norm == "layer")
    for linears, of_block in zip(matrices, norms, strict=True):
        if model.biases:  # as in GPT-2 (Radford et al. 2019), whose head has none
            for tensor in linears:  # read together where the matrices are
                yield ModelTensor(f"{tensor.name}_bias", tensor.shape[:1], Kind.BIAS, tensor.stacked)
        if norms_too:
            yield from (ModelTensor(f"{norm.name}_bias", norm.shape, Kind.BIAS) for norm in of_block)
    if norms_too:
        yield from (ModelTensor(f"{name}_bias", (d,), Kind.FINAL_BIAS) for name in outer)
    if model.norm == DYNAMIC_TANH:
        named = [*(norm.name for of_block in norms for norm in of_block), *outer]
        yield from (ModelTensor(f"{name}_alpha", (1,), Kind.SLOPE) for name in named)
    if model.layer_scale is not None:
        yield from (ModelTensor(f"{name}.layer_scale", (d,), Kind.LAYER_SCALE) for name in blocks)
    if model.hypersphere:
        yield from (ModelTensor(f"{name}.sphere_step", (d,), Kind.SPHERE_STEP) for name in blocks)
        yield ModelTensor("logit_factor", (vocabulary,), Kind.SPHERE_LOGIT)
    if model.sigma_reparam:
        for tensor in (tensor for block in matrices for tensor in block):
            yield ModelTensor(f"{tensor.name}_scale", (1,), Kind.SCALE, tensor.stacked)
    # Fixup, Zhang et al. 2019 (arXiv 1901.09321), section 3.2, rule 3: a factor for each branch, and a summand before
    # each linear layer and each non-linearity. Matrices that the model reads as one are one layer.
    if model.init == "fixup":
        yield from (ModelTensor(f"{name}.multiplier", (1,), Kind.SCALE) for name in blocks)
    yield from shifts
    if model.init == "fixup":
        yield ModelTensor("head_shift", (1,), Kind.SHIFT)


def _of_block(model: Model, number: int, branches: Branches) -> Iterator[ModelTensor]:
    """The gains of its placement's norms, and the tensors of its branches and of how streams meet them."""
    yield from placement_norms(model, number, branches)
    for branch in (branch.at(number) for branch in branches):
        yield from mixers(model, f"blocks.{number}.{branch.kind}")
        for tensor in branch.tensors():
            yield replace(tensor, name=f"blocks.{number}.{branch.kind}.{tensor.name}", layers=branch.layers)


def placement_norms(model: Model, number: int, branches: Branches) -> Iterator[ModelTensor]:
    """The gains of a block's norms beside its branches."""
    for place, branch in enumerate(branch.at(number) for branch in branches):
        at = placement_of(model, number, place)
        norms = {"norm": at.before and branch.is_normed, "output_norm": at.on_branch, "sum_norm": at.after}
        for name in (name for name, is_there in norms.items() if is_there):
            yield ModelTensor(f"blocks.{number}.{branch.kind}_{name}", (model.width,), Kind.GAIN)


def tap_shapes(model: Model, sequences: int, vocabulary: int, branches: Branches = ()) -> dict[str, tuple[int, ...]]:
    """Every activation that a tap can reach, in the order of the forward pass, and its shape for one trial.

    `sequences` are those that pass at once: the batch, or one rank's part of it. Where a norm stands in front of a
    branch, `input` is what it is fed; where none stands there, what the branch reads. Where one stands behind the
    sum, as in post-LN, `sum` is what it is fed, and the branch reads the residual stream as it is. The tap of a matrix
    shows what it gives, before a norm on that. Of several residual streams, `residual` has one behind the other for
    each token, and `mixing.0` and `.1` the matrices by which the block's branches mix them, row by row.
    """
    tokens, streams = sequences * model.context, model.residual_streams
    stream = (tokens, model.width)
    shapes: dict[str, tuple[int, ...]] = {"embedding": stream}
    for i in range(model.depth):
        for place, branch in enumerate(branch.at(i) for branch in branches or branches_of(Trial(model))):
            is_after = placement_of(model, i, place).after
            if streams > 1:
                shapes[f"blocks.{i}.mixing.{place}"] = (tokens, streams * streams)
            inside = {**({} if is_after else {"input": stream}), **branch.taps(sequences)}
            inside |= {"sum": stream} if is_after else {}
            shapes |= {f"blocks.{i}.{branch.kind}.{name}": shape for name, shape in inside.items()}
        shapes[f"blocks.{i}.residual"] = (tokens, streams * model.width)
    return {**shapes, "head.input": stream, "logits": (tokens, vocabulary)}


def struck_shapes(model: Model, sequences: int, vocabulary: int, branches: Branches = ()) -> dict[str, tuple[int, ...]]:
    """As `tap_shapes`, of the activations that go on from there."""
    observed = {
        f"blocks.{i}.{branch.kind}.{name}"
        for i in range(model.depth)
        for branch in (branch.at(i) for branch in branches or branches_of(Trial(model)))
        for name in branch.observed
    }
    shapes = tap_shapes(model, sequences, vocabulary, branches)
    return {name: shape for name, shape in shapes.items() if name not in observed}


def route_shapes(model: Model, sequences: int, branches: Branches) -> dict[str, tuple[int, ...]]:
    """Every tap at which tokens are sent to a part of a branch, and the shape of their numbers for one trial."""
    return {
        f"blocks.{i}.{branch.kind}.{name}": shape
        for i in range(model.depth)
        for branch in (branch.at(i) for branch in branches)
        for name, shape in branch.routes(sequences).items()
    }
