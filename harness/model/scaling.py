"""Sizes: what each tensor starts at and is multiplied by, and what the model multiplies by on the way forward.

How sizes follow width and depth is `model.parametrization`, how the weights start is `model.init`: a new init is a
function and its entry in INITS. m stands for width / base_width, m_L for depth / base_depth, N for depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.config import Model, Trial
from harness.model.branches import Branches
from harness.model.hypersphere import ALPHA
from harness.model.hypersphere import speed as sphere_speed
from harness.model.outline import model_tensors
from harness.model.tensors import MATRICES, SPHERE, WIDENING, Kind, ModelTensor, ScaledTensor

FIELDS = {Kind.LAYER_SCALE: "layer_scale", Kind.SLOPE: "dyt_alpha", Kind.MIX_GATE: "stream_gate"}
"""Fields of the model that say where tensors of these kinds start."""
ONES = (Kind.GAIN, Kind.FINAL_GAIN, Kind.SCALE, *SPHERE, *FIELDS)
ZEROS = (Kind.SHIFT, Kind.BIAS, Kind.FINAL_BIAS, Kind.SINK, Kind.MIX_OFFSET, Kind.VALUE_HEAD)
STARTS = {**dict.fromkeys(ONES, 1.0), **dict.fromkeys(ZEROS, 0.0), Kind.SPHERE_STEP: ALPHA}  # without noise


def tensor_table(
    model: Model,
    vocabulary: int,
    rule: str = "adam",
    decay_embedding: bool = True,
    branches: Branches = (),
    heads: Sequence[ModelTensor] = (),
) -> list[ScaledTensor]:
    """Every tensor of the model, in the order in which the optimizer wants them; no `branches`: the usual ones.

    `heads` are further ones of its objective, behind all others (`harness.model.heads.heads_of`).

    `rule` says what the size of an optimizer's update follows: "adam" nothing, because it is normalised element by
    element; "sgd" the gradient; "relative" the root mean square (RMS) of the weights; "relative_sgd" that of matrices
    and embeddings, and for vectors the gradient.

    Standard: one learning rate for all (Wortsman et al. 2023, arXiv 2309.14322, section 2).
    muP (Yang et al. 2022, arXiv 2203.03466, table 8): the standard parametrisation at the base width, bit for bit, and
    sizes that change from there so that no activation's change grows with the width (`learning_rate`). Weight decay and
    epsilon follow, as `model.mup_decay` and `model.mup_epsilon` say.
    CompleteP (Dey et al. 2025, arXiv 2505.01618, table 1): muP, and branches shrink as m_L^-depth_exponent.
    """
    matrices, _, vectors = rule.partition("_")
    table = []
    for tensor in (*model_tensors(model, vocabulary, branches), *heads):
        is_vector = tensor.kind in STARTS
        its_rule = vectors if vectors and is_vector else matrices
        has_decay = not is_vector and (decay_embedding or tensor.kind != Kind.EMBEDDING)
        scaled = ScaledTensor(
            **vars(tensor),
            std=0.0 if is_vector else initial_std(model, tensor),
            mean=STARTS.get(tensor.kind, 0.0),
            learning_rate=learning_rate(model, tensor, its_rule),
            decay=weight_decay(model, tensor, its_rule) if has_decay else 0.0,
            epsilon=epsilon(model, tensor),
            field=FIELDS.get(tensor.kind),
            is_cut=is_vector or model.init not in UNCUT_INITS,
        )
        table.append(scaled)
    return table


# --- how the weights start ---------------------------------------------------------------------------------------

Init = Callable[[Model, ModelTensor], float]


def standard(model: Model, matrix: ModelTensor) -> float:
    """1/sqrt(fan_in); embeddings and head 1/sqrt(width), for muP that of the base width (Wortsman et al. 2023)."""
    if matrix.kind in WIDENING or (matrix.kind == Kind.ROUTER and model.parametrization == "standard"):
        return 1 / math.sqrt(matrix.shape[1])
    return 1 / math.sqrt(model.width if model.parametrization == "standard" else model.base_width)


def small(model: Model, matrix: ModelTensor) -> float:
    """sqrt(2 / (5 width)) inside the blocks.

    It is Xavier's size of the feed-forward matrices (Nguyen & Salazar 2019, arXiv 1910.05895, section 2.2). Embeddings
    and head stay as they are.
    """
    return math.sqrt(2 / (5 * model.width)) if matrix.kind in MATRICES else standard(model, matrix)


def xavier(model: Model, matrix: ModelTensor) -> float:
    """sqrt(2 / (fan_in + fan_out)) inside the blocks (Glorot & Bengio 2010).

    It is what DeepNorm multiplies by beta (Wang et al. 2022, arXiv 2203.00555, figure 2). Embeddings and head stay as
    they are.
    """
    return math.sqrt(2 / sum(matrix.shape)) if matrix.kind in MATRICES else standard(model, matrix)


def scaled_residual(model: Model, matrix: ModelTensor) -> float:
    """The last matrix of each of the 2N branches times 1/sqrt(2N) (GPT-2, Radford et al. 2019, section 2.3)."""
    return standard(model, matrix) * _branch_share(model, matrix)


def small_scaled(model: Model, matrix: ModelTensor) -> float:
    """As before, and embeddings and head as small.

    They have sqrt(2 / 5) of their size, so that an embedding that is multiplied by sqrt(width) starts at sqrt(2 / 5)
    (Takase et al. 2023, arXiv 2312.16903, section 4).
    """
    size = small(model, matrix) if matrix.kind in MATRICES else math.sqrt(2 / 5) * standard(model, matrix)
    return size * _branch_share(model, matrix)


def _branch_share(model: Model, matrix: ModelTensor) -> float:
    return 1 / math.sqrt(2 * model.depth) if matrix.kind == Kind.RESIDUAL else 1.0


def zero_residual(model: Model, matrix: ModelTensor) -> float:
    """The last matrix of each branch starts at zero, so that every block starts as the identity."""
    return 0.0 if matrix.kind == Kind.RESIDUAL else standard(model, matrix)


def fixup(model: Model, matrix: ModelTensor) -> float:
    """Fixup: Zhang et al. 2019 (arXiv 1901.09321, section 3.2).

    The last matrix of each branch and the head start at zero, the others of a branch of k matrices are multiplied by
    L^(-1/(2k - 2)), with L = 2N branches.

    k is 4 for attention, as Mesh TensorFlow counts and the paper's authors say, 2 for a feed-forward part, 3 with a
    gate.
    """
    if matrix.kind in (Kind.RESIDUAL, Kind.HEAD):
        return 0.0
    if matrix.kind != Kind.HIDDEN:
        return standard(model, matrix)
    std: float = standard(model, matrix) * (2 * model.depth) ** (-1 / (2 * matrix.layers - 2))
    return std


def normal(model: Model, matrix: ModelTensor) -> float:
    """`init_std` everywhere, of a normal distribution that is not cut: OLMo 2 (2025, arXiv 2501.00656, section 3.2).

    For muP matrices inside the blocks shrink from there, as the others' sizes do.
    """
    is_smaller = matrix.kind in WIDENING and model.parametrization != "standard"
    return model.init_std * (math.sqrt(model.base_width / model.width) if is_smaller else 1.0)


def gpt2(model: Model, matrix: ModelTensor) -> float:
    """The same, the last matrix of each of the 2N branches times 1/sqrt(2N).

    It is that of GPT-2 (Radford et al. 2019, section 2.3, whose code starts the positions at 0.01) as nanoGPT and
    transformers have it.
    """
    return normal(model, matrix) * _branch_share(model, matrix)


INITS: Mapping[str, Init] = {
    "standard": standard,
    "small": small,
    "xavier": xavier,
    "scaled_residual": scaled_residual,
    "small_scaled": small_scaled,
    "zero_residual": zero_residual,
    "fixup": fixup,
    "normal": normal,
    "gpt2": gpt2,
}
UNCUT_INITS = ("normal", "gpt2")
ZERO_INITS = ("zero_residual", "fixup")  # with matrices of no size, to which nothing can be relative
SIZED_INITS = ", ".join(name for name in INITS if name not in ZERO_INITS)  # the others
DEPTH_INITS = ("scaled_residual", "small_scaled", "fixup", "gpt2")  # which say how branches shrink with depth


def initial_std(model: Model, matrix: ModelTensor) -> float:
    """Standard deviation of an embedding or matrix at the start: that of `model.init`, and what else has a say in it.

    DeepNorm multiplies it by its beta. `model.zero_head` is microsoft/mup's `readout_zero_init`: under muP random
    logits shrink as 1/sqrt(m) beside what training adds to them, and a head that starts at zero has none.
    """
    if matrix.kind == Kind.HEAD and model.zero_head:
        return 0.0
    if matrix.kind == Kind.MIXER:
        return 0.0 if model.stream_mixing == "free" else 1 / math.sqrt(matrix.shape[1])
    std = INITS[model.init](model, matrix)
    has_beta = matrix.kind in MATRICES and not matrix.name.endswith((".query", ".key"))
    return std * deepnorm_beta(model) if has_beta else std


def deepnorm_beta(model: Model) -> float:
    """What DeepNorm multiplies value, projection and feed-forward matrices by at the start; 1 for other placements.

    (8N)^(-1/4) for a decoder alone (Wang et al. 2022, arXiv 2203.00555); GLM-130B takes (2N)^(-1/2) (Zeng et al. 2022,
    arXiv 2210.02414, section 2.1).
    """
    if model.placement == "deepnorm":
        beta: float = (8 * model.depth) ** -0.25
        return beta
    return (2 * model.depth) ** -0.5 if model.placement == "deepnorm_glm" else 1.0


UNDONE = (  # by sigma-reparametrisation: field, values that say how large hidden matrices are, and the others
    ("init", INITS.keys() - {"standard", *ZERO_INITS}, "standard"),
    ("parametrization", {"mup", "completep"}, "standard"),
    ("placement", {"deepnorm", "deepnorm_glm"}, "another placement"),
)
OWN_NORMS = ("qk_norm", "qkv_norm", "value_norm", "projection_norm", "up_norm", "down_norm", "embedding_norm")


def refused(trial: Trial) -> Iterator[str]:
    """Two answers to how branches shrink with depth, sizes that are undone, and what has no place beside an init."""
    model, init = trial.model, f"model.init={trial.model.init}"
    answers = {
        "parametrization": model.parametrization == "completep",
        "placement": model.placement in ("deepnorm", "deepnorm_glm"),
        "init": model.init in DEPTH_INITS,
    }
    given = [f"model.{name}={getattr(model, name)}" for name, is_answer in answers.items() if is_answer]
    if len(given) > 1:
        yield f"{', '.join(given)}: each says how branches shrink with depth; allowed: one of them"
    if model.tied_head and (model.zero_head or model.init == "fixup"):
        zero, allowed = ("zero_head=true", "false") if model.zero_head else ("init=fixup", "another init")
        why = "starts the head at zero, which is the embedding with model.tied_head=true"
        yield f"model.{zero}: {why}; allowed: {allowed}, or model.tied_head=false"
    if model.embedding_norm and model.embedding_scale != "none":
        why = "model.embedding_norm=true divides it out"
        yield f"model.embedding_scale={model.embedding_scale}: {why}; allowed: none, or model.embedding_norm=false"
    if model.init == "fixup":
        if model.biases:
            yield f"model.biases=true: {init} has summands of its own; allowed: false, or another init"
        if model.placement != "none":
            yield f"model.placement={model.placement}: {init} goes without norms; allowed: none, or another init"
        for name in (name for name in OWN_NORMS if getattr(model, name)):
            yield f"model.{name}=true: {init} goes without norms; allowed: false, or another init"
    if model.sigma_reparam:
        if model.init in ZERO_INITS:
            why = "starts matrices at zero, and model.sigma_reparam=true divides them by their size"
            yield f"{init}: {why}; allowed: {SIZED_INITS}"
        for name, values, allowed in UNDONE:
            if getattr(model, name) in values:
                why = "model.sigma_reparam=true divides out the size of hidden matrices"
                yield f"model.{name}={getattr(model, name)}: {why}; allowed: {allowed}, or model.sigma_reparam=false"


# --- how fast they learn -----------------------------------------------------------------------------------------


def learning_rate(model: Model, tensor: ModelTensor, rule: str) -> float:
    """What the learning rate of a tensor is multiplied by.

    Width. A step must change what a tensor gives by as much at every width. A matrix inside a block sums over its
    inputs, of which there are m times as many, and a step is aligned with them: its elements may change by 1/m. An
    embedding or a gain does not sum, and the head's sum is multiplied by 1/m already: their elements change by as much
    as at the base width. A router, whose number of experts does not grow, is as the head. What rate that takes depends
    on the rule:

    - adam: elements change by the rate itself, so it is 1/m and 1 (table 8).
    - sgd: elements change by the rate times the gradient, which is 1/m everywhere because the logits are multiplied by
      1/m: so it is 1 and m (table 8). A gain that heads share adds up the gradients of m heads of one size, so it has
      only the growth of its own length, as in microsoft/mup.
    - relative: elements change by the rate times the RMS of the tensor, which is 1/sqrt(m) for a matrix inside a block
      and 1 for the others: so it is 1/sqrt(m) and 1.

    Depth, CompleteP alone, with alpha = depth_exponent. The changes of m_L times as many branches add up, each
    multiplied by m_L^-alpha: elements inside a block may change by m_L^(alpha - 1). That is the rate of adam, and of
    relative, because the weights' size does not depend on depth. With sgd the gradient inside a branch is multiplied by
    m_L^-alpha too, which leaves m_L^(2 alpha - 1). At alpha 1/2 these are the rates of depth-muP (Yang et al. 2023,
    arXiv 2310.02244).
    """
    if model.parametrization == "standard":
        return _speed(model, tensor, rule)
    m = model.width / model.base_width
    is_matrix = tensor.kind in WIDENING
    width = {
        "adam": 1 / m if is_matrix else 1.0,
        "sgd": 1.0 if is_matrix else _growth(model, tensor),
        "relative": 1 / math.sqrt(m) if is_matrix else 1.0,
    }[rule]
    if not _in_branch(tensor):
        return width
    gradient = branch_multiplier(model) if rule == "sgd" else 1.0
    return width * _branch_change(model) / gradient


def _speed(model: Model, tensor: ModelTensor, rule: str) -> float:
    """On the hypersphere: k of a factor that is learned as a number k times as small."""
    k = sphere_speed(model, tensor.kind)
    return {"adam": k, "sgd": k * k, "relative": 1.0}[rule]


def idle(trial: Trial) -> Iterator[tuple[str, str]]:
    """(key, why) of a parametrisation that is the standard one, because the model has its base sizes.

    And of an initialisation, where the weights come from a file.
    """
    model = trial.model
    if model.start is not None and model.init != "standard":
        yield "model.init", f"model.init={model.init}: the weights come from model.start"
    sizes = {"width": model.base_width, "head_dim": model.base_head_dim or model.head_dim}
    if model.parametrization == "completep":
        sizes["depth"] = model.base_depth
    if model.parametrization != "standard" and all(getattr(model, name) == base for name, base in sizes.items()):
        given = ", ".join(f"model.base_{name}={base}" for name, base in sizes.items())
        why = f"is the standard one at its base sizes, {given}"
        yield "model.parametrization", f"model.parametrization={model.parametrization}: {why}"


def _growth(model: Model, vector: ModelTensor) -> float:
    """How much longer a vector, or a row of vectors, is than at the base width."""
    if vector.size == 1:
        return 1.0
    of_qk = (".query_norm", ".key_norm", ".query_norm_bias", ".key_norm_bias")
    if vector.name.endswith(of_qk) and model.qk_norm_shared and model.qk_norm_over == "head":
        return model.head_dim / (model.base_head_dim or model.head_dim)
    return model.width / model.base_width


def _in_branch(tensor: ModelTensor) -> bool:
    return tensor.name.startswith("blocks.")


def _depth(model: Model) -> float:
    """m_L, where depth is scaled."""
    return model.depth / model.base_depth if model.parametrization == "completep" else 1.0


def _branch_change(model: Model) -> float:
    """By how much elements inside a block may change, m_L^(alpha - 1)."""
    factor: float = _depth(model) ** (model.depth_exponent - 1)
    return factor


def weight_decay(model: Model, tensor: ModelTensor, rule: str) -> float:
    """What weight decay is multiplied by where it follows the learning rate: a step takes off rate x decay of a weight.

    `model.mup_decay`. coupled: rate x decay is the same at every width, and m_L^(alpha - 1) inside a block; for adam
    that is m for a matrix there, and with sgd 1/m for embedding and head (Dey et al. 2025, table 1; microsoft/mup).
    plain: as it is (microsoft/mup with `decoupled_wd`; the muP of EleutherAI/nanoGPT-mup).
    """
    if model.parametrization == "standard" or model.mup_decay == "plain":
        return 1.0
    return (_branch_change(model) if _in_branch(tensor) else 1.0) / learning_rate(model, tensor, rule)


def epsilon(model: Model, tensor: ModelTensor) -> float:
    """What an optimizer's epsilon is multiplied by, where it is added to the size of a gradient's elements.

    `model.mup_epsilon`, of Dey et al. 2025. blocks: 1/m and m_L^-alpha inside a block, and outside as it is (table 1).
    gradients: 1/m outside too, as the gradients there shrink (equation 40). everywhere: 1/m and m_L^-alpha for all (the
    authors' code, EleutherAI/nanoGPT-mup). none: as it is (Yang et al. 2022; microsoft/mup).
    """
    if model.parametrization == "standard" or model.mup_epsilon == "none":
        return 1 / sphere_speed(model, tensor.kind)
    width, depth = model.base_width / model.width, branch_multiplier(model)
    if _in_branch(tensor) or model.mup_epsilon == "everywhere":
        return width * depth
    return width if model.mup_epsilon == "gradients" else 1.0


# --- on the way forward ------------------------------------------------------------------------------------------


def embedding_multiplier(model: Model) -> float:
    """What the embedding is multiplied by: 1, or sqrt(width) (Takase et al. 2023, arXiv 2312.16903, section 4).

    Its elements, 1/sqrt(width) at the start, are then 1, and sqrt(2 / 5) where they start as that paper's. For muP,
    whose embedding keeps its size, that is the base width's.
    """
    if model.embedding_scale == "none":
        return 1.0
    return math.sqrt(model.width if model.parametrization == "standard" else model.base_width)


def branch_multiplier(model: Model) -> float:
    """What a branch is multiplied by before it is added to the residual stream: 1, or for CompleteP m_L^-alpha."""
    factor: float = _depth(model) ** -model.depth_exponent
    return factor


def output_multiplier(model: Model) -> float:
    """What the head's output is multiplied by: 1, or for muP base_width/width."""
    return 1.0 if model.parametrization == "standard" else model.base_width / model.width
