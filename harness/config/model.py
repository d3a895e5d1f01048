"""The section of the recipe that says what the model is; what else a recipe has is in harness/config/recipe.py."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, STRUCTURAL, SWITCHED, anything, choice, number, seed
from harness.config.limits import DEEPEST, LONGEST_CONTEXT, LONGEST_EXPLICIT, WIDEST


@dataclass(frozen=True)
class Model:
    """A GPT decoder: pre-LN blocks, rotary positions, no biases, untied head."""

    # Shape
    width: int = number(STRUCTURAL, 64, "width d of the residual stream", low=1, high=WIDEST)
    depth: int = number(STRUCTURAL, 2, "number of blocks", low=1, high=DEEPEST)
    head_dim: int = number(STRUCTURAL, 16, "size of one attention head; divides the width", low=1, high=WIDEST)
    context: int = number(STRUCTURAL, 64, "tokens in one sequence", low=1, high=LONGEST_CONTEXT)
    feedforward: int | None = number(
        STRUCTURAL, None, "hidden size of the feed-forward part; null: expansion x width", low=1, high=4 * WIDEST
    )
    expansion: float | None = number(
        STRUCTURAL,
        None,
        "hidden size of the feed-forward part over the width; null: 4, and 8/3 with a gate, for as many weights",
        above=0,
        high=64,
    )
    activation: str = choice(
        STRUCTURAL, "gelu", "non-linearity of the feed-forward part", table="harness.model.layers:ACTIVATIONS"
    )
    swiglu_clamp: float | None = number(
        SWITCHED, None, "bound of SwiGLU's gate from above and of its linear part on both sides; null: none", above=0
    )
    smooth_swiglu: bool = anything(
        STRUCTURAL,
        False,
        "with train.precision=fp8: each channel of SwiGLU's product is rounded at a scale of its own, not all at one",
    )
    positions: str = choice(STRUCTURAL, "rotary", "how positions enter", "rotary", "learned")
    rotary_base: float = number(
        STRUCTURAL, 10000.0, "base of the angles' frequencies, for positions rotary", low=1, high=1e12
    )
    biases: bool = anything(STRUCTURAL, False, "learned summands of linear layers inside blocks and of LayerNorms")
    tied_head: bool = anything(STRUCTURAL, False, "the head's weights are those of the embedding")
    dropout: float | None = number(
        SWITCHED,
        None,
        "share that is dropped in training of the embedding, attention's shares and what branches add; null: none",
        low=0,
        below=1,
    )

    # Norms and the residual stream
    placement: str = choice(
        STRUCTURAL, "pre", "where norms stand in the residual stream", table="harness.model.placements:PLACEMENTS"
    )
    mix: float = number(
        STRUCTURAL, 0.25, "share of the blocks, the first ones, that are post-LN, for placement mix", low=0, high=1
    )
    branch_steps: int | None = number(
        PER_TRIAL,
        None,
        "steps over which branches grow to full size, for placement branchnorm; null: as branch_share says",
        low=1,
    )
    branch_share: float = number(
        PER_TRIAL, 0.25, "share of train.steps over which branches grow, where branch_steps is null", above=0, high=1
    )
    norm: str = choice(STRUCTURAL, "layer", "LayerNorm, RMSNorm or Dynamic Tanh", table="harness.model.layers:NORMS")
    dyt_alpha: float = number(PER_TRIAL, 0.5, "first value of the alpha of each Dynamic Tanh, for norm dyt", above=0)
    depth_scaled_norms: bool = anything(
        STRUCTURAL, False, "the norms in front of branches of block l, counted from 1, are multiplied by 1/sqrt(l)"
    )
    norm_epsilon: float = number(STRUCTURAL, 1e-6, "epsilon inside every norm", above=0)
    attention_norm: bool = anything(STRUCTURAL, True, "the norm in front of attention, where the placement has one")
    feedforward_norm: bool = anything(
        STRUCTURAL, True, "the norm in front of the feed-forward part, where the placement has one"
    )
    qkv_norm: bool = anything(STRUCTURAL, False, "a norm on each of the outputs query, key and value, before heads")
    projection_norm: bool = anything(STRUCTURAL, False, "a norm on the output of attention's projection")
    up_norm: bool = anything(STRUCTURAL, False, "a norm on the output of the first feed-forward matrix")
    down_norm: bool = anything(STRUCTURAL, False, "a norm on the output of the second feed-forward matrix")
    embedding_norm: bool = anything(STRUCTURAL, False, "a norm on the embedding")
    layer_scale: float | None = number(
        SWITCHED, None, "first value of a learned gain on each feature of each branch; null: no gain", above=0
    )
    hypersphere: bool = anything(
        STRUCTURAL, False, "weights, the residual stream, queries and keys have norm 1 (nGPT), and no other norm stands"
    )
    residual_streams: int = number(STRUCTURAL, 1, "residual streams side by side, mixed at each branch", low=1, high=16)
    stream_mixing: str = choice(
        STRUCTURAL,
        "manifold",
        "how residual streams are mixed; free: hyper-connections; manifold: by doubly stochastic matrices",
        "free",
        "manifold",
    )
    stream_gate: float = number(
        PER_TRIAL, 0.01, "first value of the learned factor on what tokens say of the mixing of streams", low=0
    )

    # Attention
    attention: str = choice(
        STRUCTURAL,
        "auto",
        "explicit: taps reach the scores; fused: torch's fused kernel; auto: explicit up to context 256",
        "auto",
        "explicit",
        "fused",
    )
    qk_norm: bool = anything(STRUCTURAL, False, "a norm on each head's queries and keys")
    qk_norm_shared: bool = anything(STRUCTURAL, True, "one gain for the qk_norm of all heads of a block")
    qk_norm_over: str = choice(
        STRUCTURAL, "head", "what a qk_norm is taken over: each head, or all of them together", "head", "heads"
    )
    value_norm: bool = anything(STRUCTURAL, False, "a norm on each head's values")
    attention_temperature: float | None = number(
        SWITCHED, None, "factor on attention logits (soft temperature); null: none", above=0
    )
    attention_cap: float | None = number(
        SWITCHED, None, "bound c of attention logits, as c tanh(x / c); null: none", above=0
    )
    soft_clip_high: float | None = number(
        SWITCHED, None, "zeta of the clipped softmax, clip((zeta - gamma) p + gamma, 0, 1); null: plain softmax", low=1
    )
    soft_clip_low: float = number(PER_TRIAL, -0.03, "gamma of the clipped softmax", high=0)
    attention_gate: str = choice(
        STRUCTURAL,
        "none",
        "a sigmoid gate on what attention mixes, before its projection: one for each feature, or for each head",
        "none",
        "element",
        "head",
    )
    attention_sink: bool = anything(
        STRUCTURAL, False, "a learned logit of each head, which takes part in the softmax and leads nowhere"
    )
    qk_clip: float | None = number(
        SWITCHED, None, "largest attention logit of a head before its query and key weights shrink; null: any", above=0
    )

    # Output
    output_cap: float | None = number(SWITCHED, None, "bound c of output logits, as c tanh(x / c); null: none", above=0)

    # Initialisation and parametrisation
    init: str = choice(STRUCTURAL, "standard", "sizes of the initial weights", table="harness.model.scaling:INITS")
    init_std: float = number(STRUCTURAL, 0.02, "size of initial weights, for init normal and gpt2", above=0)
    start: str | None = anything(
        PER_TRIAL,
        None,
        "file of the initial weights, as of keep=weights, or a results folder that has those of this model and seed; "
        "null: drawn ones",
    )
    embedding_scale: str = choice(
        STRUCTURAL, "none", "factor on the embedding; sqrt_width: sqrt(width)", "none", "sqrt_width"
    )
    sigma_reparam: bool = anything(
        STRUCTURAL, False, "hidden matrices divided by their spectral norm and times a learned number"
    )
    parametrization: str = choice(
        STRUCTURAL, "standard", "how sizes scale with width and depth", "standard", "mup", "completep"
    )
    base_width: int = number(
        STRUCTURAL, 64, "width at which muP equals the standard parametrisation", low=1, high=WIDEST
    )
    base_head_dim: int | None = number(
        STRUCTURAL, None, "head size at which muP equals the standard one; null: this model's", low=1, high=WIDEST
    )
    base_depth: int = number(STRUCTURAL, 2, "depth at which CompleteP equals muP", low=1, high=DEEPEST)
    depth_exponent: float = number(
        STRUCTURAL, 1.0, "alpha of CompleteP: branches shrink as depth^-alpha", low=0.5, high=1
    )
    mup_decay: str = choice(
        STRUCTURAL,
        "coupled",
        "weight decay of muP and CompleteP; coupled: rate x decay is the same at every width; plain: decay is",
        "coupled",
        "plain",
    )
    mup_epsilon: str = choice(
        STRUCTURAL,
        "blocks",
        "where muP and CompleteP divide the optimizer's epsilon by the width; gradients: as gradients shrink",
        "blocks",
        "gradients",
        "everywhere",
        "none",
    )
    zero_head: bool = anything(STRUCTURAL, False, "the head starts at zero")
    seed: int | None = seed("seed of the initial weights; null: the trial's seed")

    @property
    def reads_scores(self) -> bool:
        """Whether the model itself works on attention's scores or shares, which a fused kernel never shows."""
        limits = self.attention_cap, self.soft_clip_high, self.dropout
        return self.attention_sink or any(value is not None for value in limits)

    @property
    def explicit_attention(self) -> bool:
        """Whether scores are an ordinary tensor: a property of the shape, not of what is attached or of the device."""
        if self.attention == "auto":
            return self.context <= LONGEST_EXPLICIT or self.reads_scores
        return self.attention == "explicit"
