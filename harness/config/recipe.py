"""The sections of the recipe, in which every default is visible: optimizer, schedule, training, screening.

That of the model is in harness/config/model.py.

The defaults are the recipe of Wortsman et al. 2023 (arXiv 2309.14322, section 2) without its two remedies, QK-norm and
z-loss, which are mitigations here; sizes and rate are small ones. Other published recipes are in sweeps/conf/recipe/.
Each field says whether it is *per-trial*, *structural* or *switched* (harness/config/fields.py), and what values it
allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import PER_TRIAL, STRUCTURAL, SWITCHED, anything, choice, number
from harness.config.limits import (
    LARGEST_BATCH,
    LARGEST_SCALE,
    LARGEST_SEED,
    LONGEST_CONTEXT,
    MOST_GROWING,
    MOST_STEPS,
    MOST_TOKENS,
)


@dataclass(frozen=True)
class Optim:
    """The optimizer, what all of them share, and clipping of gradients and updates."""

    name: str = choice(STRUCTURAL, "adamw", "the optimizer", table="harness.optim.optimizers:OPTIMIZERS")
    lr: float = number(PER_TRIAL, 3e-3, "peak learning rate", low=0)
    beta1: float = number(PER_TRIAL, 0.9, "decay of the first moment; sgd and lars: momentum", low=0, below=1)
    beta2: float = number(PER_TRIAL, 0.95, "decay of the second moment; lion: of the momentum", low=0, below=1)
    beta2_exponent: float | None = number(
        SWITCHED,
        None,
        "c of 1 - k^-c, which is Adam's decay of the second moment at step k; null: beta2",
        above=0,
        high=10,
    )
    eps: float = number(PER_TRIAL, 1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = number(PER_TRIAL, 1e-4, "decoupled weight decay of matrices", low=0)
    decay_embedding: bool = anything(
        STRUCTURAL, True, "weight decay of embeddings too, and not of other matrices alone"
    )
    decay_follows: str = choice(
        PER_TRIAL,
        "schedule",
        "what weight decay is multiplied by; schedule: the rate over its peak, so that it does not depend on lr",
        "rate",
        "schedule",
    )
    clip: float | None = number(PER_TRIAL, 1.0, "largest global gradient norm; null: no clipping", above=0)
    clip_value: float | None = number(SWITCHED, None, "largest size of a gradient's element; null: any", above=0)
    clip_tensor: float | None = number(SWITCHED, None, "largest gradient norm of each tensor; null: any", above=0)
    clip_update: float | None = number(
        SWITCHED, None, "largest root mean square of a tensor's update, before the rate; null: any", above=0
    )


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then decay to `final_rate` at the last step; growth of sequences and batches."""

    warmup: int | None = number(PER_TRIAL, None, "steps of linear warm-up; null: as warmup_share says", low=0)
    warmup_share: float = number(
        PER_TRIAL, 0.05, "share of train.steps that the warm-up takes, where warmup is null", low=0, high=1
    )
    decay: str = choice(PER_TRIAL, "cosine", "shape after warm-up", table="harness.optim.schedules:SHAPES")
    final: float | None = number(
        PER_TRIAL, None, "share of the peak rate at the end of the decay; null: as final_rate says", low=0, high=1
    )
    final_rate: float = number(
        PER_TRIAL, 1e-5, "learning rate at the end of the decay, at most the peak, where final is null", low=0
    )
    cooldown: float = number(
        PER_TRIAL, 0.2, "share of the run in which the rate falls, for decay wsd and wsd_linear", above=0, high=1
    )
    cycles: int = number(PER_TRIAL, 4, "cosine cycles after warm-up, for decay restarts", low=1, high=MOST_STEPS)
    sequence_start: int | None = number(
        STRUCTURAL,
        None,
        "tokens in a sequence at step 0, which grow to model.context; null: all from the start",
        low=1,
        high=LONGEST_CONTEXT,
    )
    sequence_steps: int = number(STRUCTURAL, 50, "steps over which sequences grow", low=1, high=MOST_GROWING)
    sequence_mode: str = choice(
        STRUCTURAL,
        "truncate",
        "truncate: each sequence is cut, and the run takes more steps for as many tokens; reshape: cut into several",
        "truncate",
        "reshape",
    )
    batch_start: int | None = number(
        STRUCTURAL,
        None,
        "sequences in a batch at step 0, which grow to train.batch; null: all from the start",
        low=1,
        high=LARGEST_BATCH,
    )
    batch_steps: int = number(STRUCTURAL, 50, "steps over which batches grow", low=1, high=MOST_GROWING)


@dataclass(frozen=True)
class Train:
    """How long, on how much, in what precision."""

    steps: int = number(
        STRUCTURAL,
        200,
        "optimizer steps with whole batches; where batches or sequences grow, more steps for as many tokens",
        low=1,
        high=MOST_STEPS,
    )
    batch: int = number(STRUCTURAL, 8, "sequences in a batch", low=1, high=LARGEST_BATCH)
    z_loss: float = number(
        PER_TRIAL, 0.0, "coefficient of log^2 Z of the output logits in what is differentiated, not in the loss", low=0
    )
    precision: str = choice(
        STRUCTURAL,
        "fp32",
        "format of matrix products; bf16 and fp16 keep float32 weights, tf32 is float32 of which products read 10 bits "
        "of mantissa, and a CPU emulates them; fp8: bf16 with emulated fp8 operands of linear layers; fp64: reference "
        "runs",
        table="harness.model.precision:FORMATS",
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
    loss_scale_per: str = choice(
        STRUCTURAL,
        "batch",
        "when gradients are divided by it: after the mean over the whole batch, or each part's before it is added",
        "batch",
        "micro_batch",
    )
    ranks: int = number(STRUCTURAL, 1, "simulated data-parallel ranks; divides the batch", low=1, high=LARGEST_BATCH)
    micro_batches: int = number(
        STRUCTURAL,
        1,
        "equal parts of the batch, or of each rank's share of it, that pass one after the other; gradients are added "
        "in float32",
        low=1,
        high=LARGEST_BATCH,
    )
    reduction: str = choice(
        STRUCTURAL, "sequential", "order in which gradients of ranks are added", "sequential", "reversed", "pairwise"
    )
    accumulation: str = choice(
        STRUCTURAL, "fp32", "format of the running sum over ranks", table="harness.config.formats:LAYOUTS"
    )
    checkpointing: bool = anything(
        STRUCTURAL,
        False,
        "activations inside a block are computed again in the backward pass and not kept; a fault strikes them in the "
        "forward pass alone, and what is computed again is without it, as after a transient fault",
    )
    validate_every: int = number(STRUCTURAL, 50, "steps between validations; the last step always validates", low=1)
    validate_tokens: int = number(
        STRUCTURAL,
        65536,
        "held-out tokens of the last validation, the same for every trial; more than there are: all",
        low=1,
        high=MOST_TOKENS,
    )
    validate_between: int = number(
        STRUCTURAL,
        2048,
        "held-out tokens of the other validations, and of the one before the first step",
        low=1,
        high=MOST_TOKENS,
    )

    @property
    def parts(self) -> int:
        """Equal parts of a batch that pass one after the other: micro-batches of all ranks."""
        return self.ranks * self.micro_batches

    @property
    def sequences(self) -> int:
        """Sequences of a trial that pass through the model together."""
        return self.batch // self.parts


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
