"""The configuration of one trial: frozen dataclasses in which every default is visible.

Each field says whether it is *per-trial*, *structural* or *switched* (harness/fields.py), and what values it allows.
Optimizers, clippers and other parts that have hyperparameters of their own bring a section along (`sections`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

from harness.fields import (
    PER_TRIAL,
    STRUCTURAL,
    SWITCHED,
    ConfigError,
    Problems,
    anything,
    checked,
    choice,
    field_types,
    number,
    structure,
)

__all__ = [
    "PER_TRIAL",
    "STRUCTURAL",
    "SWITCHED",
    "ConfigError",
    "Problems",
    "anything",
    "checked",
    "choice",
    "field_types",
    "number",
]

LONGEST_EXPLICIT = 256  # tokens; beyond it the score matrix costs more than the taps on it are worth
LARGEST_SEED = 2**63 - 1  # what an int64 coordinate of the results can hold
SMALLEST_SCALE = 2.0**-24  # of the loss, where it is dynamic; gradients that overflow even so are not the scale's fault
LARGEST_SCALE = 2.0**126  # of the loss; float32 still holds its reciprocal as a normal number


@dataclass(frozen=True)
class Model:
    """A GPT decoder: pre-LN blocks, no biases, untied head (Wortsman et al. 2023, arXiv 2309.14322, section 2)."""

    # Shape
    width: int = number(STRUCTURAL, 64, "width d of the residual stream", low=1)
    depth: int = number(STRUCTURAL, 2, "number of blocks", low=1)
    head_dim: int = number(STRUCTURAL, 16, "size of one attention head; divides the width", low=1)
    context: int = number(STRUCTURAL, 64, "tokens in one sequence", low=1)
    feedforward: int | None = number(STRUCTURAL, None, "hidden size of the feed-forward part; null: 4 x width", low=1)
    activation: str = choice(
        STRUCTURAL, "gelu", "non-linearity of the feed-forward part", table="harness.activations:ACTIVATIONS"
    )
    swiglu_clamp: float | None = number(
        SWITCHED, None, "bound of SwiGLU's gate from above and of its linear part on both sides; null: none", above=0
    )
    positions: str = choice(STRUCTURAL, "rotary", "how positions enter", "rotary", "learned")

    # Norms and the residual stream
    placement: str = choice(
        STRUCTURAL, "pre", "where norms stand in the residual stream", table="harness.placements:PLACEMENTS"
    )
    mix: float = number(
        STRUCTURAL, 0.25, "share of the blocks, the first ones, that are post-LN, for placement mix", low=0, high=1
    )
    branch_steps: int = number(
        PER_TRIAL, 100, "steps over which branches grow to full size, for placement branchnorm", low=1
    )
    norm: str = choice(STRUCTURAL, "layer", "LayerNorm or RMSNorm", table="harness.norms:NORMS")
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
    qk_clip: float | None = number(
        SWITCHED, None, "largest attention logit of a head before its query and key weights shrink; null: any", above=0
    )

    # Output
    output_cap: float | None = number(SWITCHED, None, "bound c of output logits, as c tanh(x / c); null: none", above=0)

    # Initialisation and parametrisation
    init: str = choice(STRUCTURAL, "standard", "sizes of the initial weights", table="harness.scaling:INITS")
    embedding_scale: str = choice(
        STRUCTURAL, "none", "factor on the embedding; sqrt_width: sqrt(width)", "none", "sqrt_width"
    )
    sigma_reparam: bool = anything(
        STRUCTURAL, False, "hidden matrices divided by their spectral norm and times a learned number"
    )
    parametrization: str = choice(
        STRUCTURAL, "standard", "how sizes scale with width and depth", "standard", "mup", "completep"
    )
    base_width: int = number(STRUCTURAL, 64, "width at which muP equals the standard parametrisation", low=1)
    base_head_dim: int | None = number(
        STRUCTURAL, None, "head size at which muP equals the standard one; null: this model's", low=1
    )
    base_depth: int = number(STRUCTURAL, 2, "depth at which CompleteP equals muP", low=1)
    depth_exponent: float = number(
        STRUCTURAL, 1.0, "alpha of CompleteP: branches shrink as depth^-alpha", low=0.5, high=1
    )
    seed: int | None = number(
        PER_TRIAL, None, "seed of the initial weights; null: the trial's seed", low=0, high=LARGEST_SEED
    )

    @property
    def reads_scores(self) -> bool:
        """Whether the model itself works on attention's scores, which a fused kernel never shows."""
        return self.attention_cap is not None or self.soft_clip_high is not None

    @property
    def explicit_attention(self) -> bool:
        """Whether scores are an ordinary tensor: a property of the shape, not of what is attached or of the device."""
        if self.attention == "auto":
            return self.context <= LONGEST_EXPLICIT or self.reads_scores
        return self.attention == "explicit"


@dataclass(frozen=True)
class Optim:
    """The optimizer, what all of them share, and clipping of gradients and updates."""

    name: str = choice(STRUCTURAL, "adamw", "the optimizer", table="harness.optimizers:OPTIMIZERS")
    lr: float = number(PER_TRIAL, 3e-3, "peak learning rate", low=0)
    beta1: float = number(PER_TRIAL, 0.9, "decay of the first moment; sgd and lars: momentum", low=0, below=1)
    beta2: float = number(PER_TRIAL, 0.999, "decay of the second moment; lion: of the momentum", low=0, below=1)
    eps: float = number(PER_TRIAL, 1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = number(PER_TRIAL, 1e-4, "decoupled weight decay of matrices", low=0)
    decay_follows: str = choice(
        PER_TRIAL,
        "rate",
        "what weight decay is multiplied by; schedule: the rate over its peak, so that it does not depend on lr",
        "rate",
        "schedule",
    )
    clip: float | None = number(PER_TRIAL, None, "largest global gradient norm; null: no clipping", above=0)
    clip_value: float | None = number(SWITCHED, None, "largest size of a gradient's element; null: any", above=0)
    clip_tensor: float | None = number(SWITCHED, None, "largest gradient norm of each tensor; null: any", above=0)
    clip_update: float | None = number(
        SWITCHED, None, "largest root mean square of a tensor's update, before the rate; null: any", above=0
    )


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then decay to `final` of the peak rate at the last step; growth of sequences and batches."""

    warmup: int | None = number(PER_TRIAL, None, "steps of linear warm-up; null: as warmup_share says", low=0)
    warmup_share: float = number(
        PER_TRIAL, 0.05, "share of train.steps that the warm-up takes, where warmup is null", low=0, high=1
    )
    decay: str = choice(PER_TRIAL, "cosine", "shape after warm-up", table="harness.schedules:SHAPES")
    final: float = number(PER_TRIAL, 0.0, "share of the peak rate at the end of the decay", low=0, high=1)
    cooldown: float = number(
        PER_TRIAL, 0.2, "share of the run in which the rate falls, for decay wsd and wsd_linear", above=0, high=1
    )
    cycles: int = number(PER_TRIAL, 4, "cosine cycles after warm-up, for decay restarts", low=1)
    sequence_start: int | None = number(
        STRUCTURAL, None, "tokens in a sequence at step 0, which grow to model.context; null: all from the start", low=1
    )
    sequence_steps: int = number(STRUCTURAL, 50, "steps over which sequences grow", low=1)
    sequence_mode: str = choice(
        STRUCTURAL,
        "truncate",
        "truncate: each sequence is cut, and the run takes more steps for as many tokens; reshape: cut into several",
        "truncate",
        "reshape",
    )
    batch_start: int | None = number(
        STRUCTURAL, None, "sequences in a batch at step 0, which grow to train.batch; null: all from the start", low=1
    )
    batch_steps: int = number(STRUCTURAL, 50, "steps over which batches grow", low=1)


@dataclass(frozen=True)
class Train:
    """How long, on how much, in what precision."""

    steps: int = number(
        STRUCTURAL,
        200,
        "optimizer steps with whole batches; where batches or sequences grow, more steps for as many tokens",
        low=1,
    )
    batch: int = number(STRUCTURAL, 8, "sequences in a batch", low=1)
    z_loss: float = number(
        PER_TRIAL, 0.0, "coefficient of log^2 Z of the output logits in what is differentiated, not in the loss", low=0
    )
    precision: str = choice(
        STRUCTURAL,
        "fp32",
        "format of matrix products; bf16 and fp16 keep float32 weights, and a CPU emulates them; "
        "fp8: bf16 with emulated fp8 operands of linear layers; fp64: reference runs",
        "fp32",
        "bf16",
        "fp16",
        "fp8",
        "fp64",
    )
    norms: str = choice(
        STRUCTURAL, "fp32", "format of what norms read and leave; products: that of matrix products", "fp32", "products"
    )
    softmax: str = choice(
        STRUCTURAL,
        "fp32",
        "format of attention's softmax; products: each of its steps is rounded to that of matrix products",
        "fp32",
        "products",
    )
    loss_scaling: str = choice(
        PER_TRIAL,
        "none",
        "factor on the loss before the backward pass; dynamic: torch.amp.GradScaler's, which halves and doubles it",
        "none",
        "static",
        "dynamic",
    )
    loss_scale: float = number(
        PER_TRIAL, 65536.0, "the factor; where loss_scaling is dynamic, the first one", above=0, high=LARGEST_SCALE
    )
    loss_scale_growth: int = number(
        PER_TRIAL, 2000, "steps in a row without overflow that double a dynamic scale", low=1, high=LARGEST_SEED
    )
    ranks: int = number(STRUCTURAL, 1, "simulated data-parallel ranks; divides the batch", low=1)
    reduction: str = choice(
        STRUCTURAL, "sequential", "order in which gradients of ranks are added", "sequential", "reversed", "pairwise"
    )
    accumulation: str = choice(
        STRUCTURAL, "fp32", "format of the running sum over ranks", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"
    )
    checkpointing: bool = anything(
        STRUCTURAL,
        False,
        "activations inside a block are computed again in the backward pass and not kept; a fault strikes them in the "
        "forward pass alone, and what is computed again is without it, as after a transient fault",
    )
    validate_every: int = number(STRUCTURAL, 50, "steps between validations; the last step always validates", low=1)
    validate_batches: int = number(STRUCTURAL, 2, "batches of one validation, the same for every trial", low=1)


@dataclass(frozen=True)
class Screen:
    """Sequences of a batch that are dropped before they train, because their tokens are not those of the corpus."""

    rarity: float | None = number(
        SWITCHED, None, "largest mean of -log p(token) in the corpus, nat/token; null: any", above=0
    )
    repetition: float | None = number(
        SWITCHED,
        None,
        "largest share of tokens that repeat an earlier pair of the sequence; null: any",
        above=0,
        high=1,
    )
    entropy: float | None = number(
        SWITCHED, None, "smallest entropy of the sequence's own tokens, nat; null: any", above=0
    )


@dataclass(frozen=True)
class Data:
    """Where the tokens come from."""

    source: str = choice(
        STRUCTURAL,
        "stdlib",
        "stdlib: Python's own source; text: your files; tokens: uint16 shards; zipf: synthetic",
        "stdlib",
        "text",
        "tokens",
        "zipf",
    )
    path: str | None = anything(STRUCTURAL, None, "file or folder, for source text and tokens")
    tokenizer: str = choice(STRUCTURAL, "bytes", "how text becomes tokens", "bytes", "bpe")
    vocabulary: int = number(
        STRUCTURAL, 256, "size of the vocabulary, for tokenizer bpe and source zipf and tokens", low=2, high=65536
    )
    exponent: float = number(STRUCTURAL, 1.0, "exponent of Zipf's law, for source zipf", low=0)
    length: int = number(STRUCTURAL, 2_000_000, "tokens to make, for source zipf", low=1000)
    validation: float = number(STRUCTURAL, 0.1, "share of the text that is held out", above=0, below=1)
    seed: int | None = number(
        PER_TRIAL, None, "seed of the order of batches; null: the trial's seed", low=0, high=LARGEST_SEED
    )


@dataclass(frozen=True)
class Fault:
    """What every fault has. Each injector adds its own fields in a subclass; this one alone is no fault at all."""

    kind: str = "none"
    name: str = "none"  # the option `fault=name` that was chosen; several may share a kind
    start: int = number(PER_TRIAL, 0, "step of the (first) strike", low=0)
    duration: int | None = number(
        PER_TRIAL, 1, "steps from the first strike to the last; null: permanent, to the end of the run", low=1
    )
    period: int = number(PER_TRIAL, 1, "steps from one strike to the next within the duration", low=1)
    seed: int | None = number(
        PER_TRIAL, None, "seed of whatever the fault draws; null: the trial's seed", low=0, high=LARGEST_SEED
    )


NO_FAULT = Fault()
IDENTITY = ("kind", "name")  # of a fault: not for the command line, which chooses them with `fault=name`
CORE: dict[str, type] = {
    "model": Model,
    "optim": Optim,
    "schedule": Schedule,
    "train": Train,
    "screen": Screen,
    "data": Data,
}


@cache
def sections() -> Mapping[str, type]:
    """Every section of a trial but its fault: those above, and those that optimizers and clippers bring along.

    A module of harness/optimizers/ or harness/clippers/ that defines a dataclass `Options` adds a section of its name.
    """
    from harness import clippers, optimizers  # late, because they build on what is defined here

    found = dict(CORE)
    for package in (optimizers, clippers):
        for name, module in modules_of(package).items():
            if hasattr(module, "Options"):
                found[name] = module.Options
    return found


def modules_of(package: ModuleType) -> dict[str, ModuleType]:
    """The modules in a package's folder, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


@cache
def _defaults() -> Mapping[str, Any]:
    return {name: cls() for name, cls in sections().items()}


@dataclass(frozen=True)
class Trial:
    """One training run. Its id is a hash of everything below, so equal configurations are the same trial.

    `extras` are sections that optimizers and clippers bring along, by name, those at their defaults left out: a new
    one does not change the id of a trial that knows nothing of it.
    """

    model: Model = Model()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    train: Train = Train()
    screen: Screen = Screen()
    data: Data = Data()
    fault: Fault = NO_FAULT
    mitigation: str = "none"
    seed: int = number(PER_TRIAL, 0, "seed of everything that has no seed of its own", low=0, high=LARGEST_SEED)
    extras: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, Any], **others: Any) -> Trial:
        """The trial with these sections, by name; `others` are fault, mitigation and seed."""
        core = {name: values for name, values in parts.items() if name in CORE}
        extras = sorted((name, values) for name, values in parts.items() if name not in CORE)
        return cls(**core, **others, extras=tuple((k, v) for k, v in extras if v != _defaults()[k]))

    def section(self, name: str) -> Any:
        """One section by its name, also of those that optimizers and clippers bring along."""
        return getattr(self, name) if name in CORE else dict(self.extras).get(name, _defaults()[name])

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as they are stored with the results."""
        parts = {name: dict(vars(getattr(self, name))) for name in (*CORE, "fault")}
        extras = {name: dict(vars(values)) for name, values in self.extras}
        return {**parts, **extras, "mitigation": self.mitigation, "seed": self.seed}

    @cached_property
    def id(self) -> str:
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def golden(self) -> Trial:
        """The golden twin: the same trial without the fault."""
        return self if self.fault == NO_FAULT else dataclasses.replace(self, fault=NO_FAULT)

    @cached_property
    def structure(self) -> tuple:
        """What the trials of a pack have in common: trials with equal structure can share one."""
        return tuple((name, structure(self.section(name))) for name in sections())

    @property
    def steps(self) -> int:
        """Optimizer steps of the run: more than train.steps where sequences or batches grow, for as many tokens."""
        if self.schedule.sequence_start is None and self.schedule.batch_start is None:
            return self.train.steps
        from harness.curriculum import curriculum_of  # late, because it builds on what is defined here

        return curriculum_of(self).steps

    @property
    def seeds(self) -> dict[str, int]:
        """The three seeds in force: initial weights, data order, fault."""
        own = {"init": self.model.seed, "data": self.data.seed, "fault": self.fault.seed}
        return {name: self.seed if seed is None else seed for name, seed in own.items()}


def trial_from_dict(values: Mapping[str, Any], fault_types: Mapping[str, type[Fault]]) -> Trial:
    """The inverse of `Trial.to_dict`; `fault_types` maps a fault's kind to its dataclass."""
    parts = {name: cls(**values[name]) for name, cls in sections().items() if name in values}
    fault = fault_types[values["fault"]["kind"]](**values["fault"])
    return Trial.of(parts, fault=fault, mitigation=values["mitigation"], seed=values["seed"])
