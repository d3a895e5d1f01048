"""What is known of a tensor of the model: its name, shape and kind, and how it is scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a tensor does, which decides how it starts and how fast it learns."""

    EMBEDDING = "embedding"  # [vocabulary or positions, width]: a vector for each
    HIDDEN = "hidden"  # [out, in], inside a block
    RESIDUAL = "residual"  # [out, in], the last matrix of a branch: what it gives is added to the residual stream
    ROUTER = "router"  # [experts, width], inside a block: as of the head only its input grows with the width
    HEAD = "head"  # [vocabulary, width]
    VALUE_HEAD = "value_head"  # [1, width], what a token's state is worth to a policy, which starts at zero
    GAIN = "gain"  # [features], of a norm inside a block, or a row of them for each of several norms side by side
    FINAL_GAIN = "final_gain"  # [features], of a norm outside of the blocks
    LAYER_SCALE = "layer_scale"  # [width], a gain on what a branch gives, which starts at the trial's model.layer_scale
    SLOPE = "slope"  # [1], the alpha of a Dynamic Tanh, which starts at the trial's model.dyt_alpha
    SINK = "sink"  # [heads], a logit of each head that belongs to no token, which starts at zero
    MIXER = "mixer"  # [few, features of the residual streams], says of each token how its streams are mixed
    MIX_GATE = "mix_gate"  # [3], factors on what a mixer says, which start at the trial's model.stream_gate
    MIX_OFFSET = "mix_offset"  # [few], what the mixing of streams is whatever a token says, over what it starts at
    SPHERE_STEP = "sphere_step"  # [width], how far a branch moves a stream of norm 1 (harness/model/hypersphere.py)
    SPHERE_QK = "sphere_qk"  # [heads, head_dim], a factor on queries and keys of norm 1
    SPHERE_UP = "sphere_up"  # [hidden], a factor on what a feed-forward part multiplies
    SPHERE_LOGIT = "sphere_logit"  # [vocabulary], a factor on logits
    SCALE = "scale"  # [1], a learned factor that starts at one
    SHIFT = "shift"  # [1], a learned summand that starts at zero
    BIAS = "bias"  # [features], a learned summand of a linear layer or norm inside a block, which starts at zero
    FINAL_BIAS = "final_bias"  # [features], of a norm outside of the blocks


SPHERE = (Kind.SPHERE_STEP, Kind.SPHERE_QK, Kind.SPHERE_UP, Kind.SPHERE_LOGIT)
WIDENING = (Kind.HIDDEN, Kind.RESIDUAL)  # inside of blocks: both sides grow with the width
MATRICES = (*WIDENING, Kind.ROUTER)


@dataclass(frozen=True)
class ModelTensor:
    """One named tensor. `shape` is [out, in] for matrices, as in torch.nn.Linear.

    A `stacked` matrix stands right behind the one before it, because the model reads both as one. `layers` are the
    matrices of its branch.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    stacked: bool = False
    layers: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ScaledTensor(ModelTensor):
    """A tensor and how it is scaled.

    It starts at `mean`, plus noise of size `std`; the others multiply what the configuration says for all of them.
    Where `field` names a field of the model, the tensor starts at the trial's value of it, and not at `mean`. Where it
    `is_cut`, the noise is normal within two of its deviations, and else without a bound.
    """

    std: float = 0.0
    mean: float = 0.0
    learning_rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    field: str | None = None
    is_cut: bool = True
