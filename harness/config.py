"""The configuration of one trial: frozen dataclasses in which every default is visible.

Each field says whether it is *per-trial* (it may differ between the trials of one pack) or *structural*
(it fixes the shape of the computation, so all trials of a pack share it), and what values it allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

PER_TRIAL, STRUCTURAL = "per-trial", "structural"
LONGEST_EXPLICIT = 256  # tokens; beyond it the score matrix costs more than the taps on it are worth
LARGEST_SEED = 2**63 - 1  # what an int64 coordinate of the results can hold
SMALLEST_SCALE = 2.0**-24  # of the loss, where it is dynamic; gradients that overflow even so are not the scale's fault
LARGEST_SCALE = 2.0**126  # of the loss; float32 still holds its reciprocal as a normal number


class ConfigError(ValueError):
    """A configuration that cannot be run. Each of its reasons names the key, the value and what is allowed."""

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Problems:
    """Collects the reasons of ConfigErrors, each once, so that all of them are reported and not the first alone."""

    def __init__(self) -> None:
        self.reasons: dict[str, None] = {}

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the reasons of a ConfigError that ends the block."""
        try:
            yield
        except ConfigError as error:
            self.reasons.update(dict.fromkeys(error.reasons))

    def check(self) -> None:
        """Raises one ConfigError with all reasons, if there are any."""
        if self.reasons:
            raise ConfigError(*self.reasons)


def _setting(
    scope: str, default: Any, help: str, allowed: str, check: Callable[[Any], bool], choices: tuple[str, ...] = ()
) -> Any:
    metadata = {"scope": scope, "help": help, "allowed": allowed, "check": check, "choices": choices}
    return field(default=default, metadata=metadata)


def number(
    scope: str,
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A number, bounded inclusively by `low` and `high`, exclusively by `above` and `below`."""
    bounds = [(">=", low, lambda x: x >= low), (">", above, lambda x: x > above)]
    bounds += [("<=", high, lambda x: x <= high), ("<", below, lambda x: x < below)]
    held = [(f"{sign} {bound}", test) for sign, bound, test in bounds if bound is not None]
    allowed = " and ".join(text for text, _ in held) or "any number"
    return _setting(scope, default, help, allowed, lambda x: abs(x) < float("inf") and all(t(x) for _, t in held))


def choice(scope: str, default: str, help: str, *choices: str) -> Any:
    """One of a few words."""
    return _setting(scope, default, help, ", ".join(choices), lambda x: x in choices, choices)


def anything(scope: str, default: Any, help: str) -> Any:
    """A value that its type alone constrains."""
    return _setting(scope, default, help, "any value of its type", lambda x: True)


@dataclass(frozen=True)
class Model:
    """A GPT decoder: pre-LN blocks, no biases, untied head (Wortsman et al. 2023, arXiv 2309.14322, section 2)."""

    width: int = number(STRUCTURAL, 64, "width d of the residual stream", low=1)
    depth: int = number(STRUCTURAL, 2, "number of blocks", low=1)
    head_dim: int = number(STRUCTURAL, 16, "size of one attention head; divides the width", low=1)
    context: int = number(STRUCTURAL, 64, "tokens in one sequence", low=1)
    feedforward: int | None = number(STRUCTURAL, None, "hidden size of the feed-forward part; null: 4 x width", low=1)
    activation: str = choice(STRUCTURAL, "gelu", "non-linearity of the feed-forward part", "gelu", "swiglu")
    positions: str = choice(STRUCTURAL, "rotary", "how positions enter", "rotary", "learned")
    qk_norm: bool = anything(STRUCTURAL, False, "LayerNorm on each head's queries and keys")
    attention: str = choice(
        STRUCTURAL,
        "auto",
        "explicit: taps reach the scores; fused: torch's fused kernel; auto: explicit up to context 256",
        "auto",
        "explicit",
        "fused",
    )
    norm_epsilon: float = number(STRUCTURAL, 1e-6, "epsilon inside every LayerNorm", above=0)
    parametrization: str = choice(STRUCTURAL, "standard", "how sizes scale with width", "standard", "mup")
    base_width: int = number(STRUCTURAL, 64, "width at which muP equals the standard parametrisation", low=1)
    base_head_dim: int | None = number(
        STRUCTURAL, None, "head size at which muP equals the standard one; null: this model's", low=1
    )
    seed: int | None = number(
        PER_TRIAL, None, "seed of the initial weights; null: the trial's seed", low=0, high=LARGEST_SEED
    )

    @property
    def explicit_attention(self) -> bool:
        """Whether scores are an ordinary tensor: a property of the shape, not of what is attached or of the device."""
        return self.attention == "explicit" or (self.attention == "auto" and self.context <= LONGEST_EXPLICIT)


@dataclass(frozen=True)
class Optim:
    """AdamW (Loshchilov & Hutter 2019) as torch.optim.AdamW computes it, and clipping by global norm."""

    lr: float = number(PER_TRIAL, 3e-3, "peak learning rate", low=0)
    beta1: float = number(PER_TRIAL, 0.9, "decay of the first moment", low=0, below=1)
    beta2: float = number(PER_TRIAL, 0.999, "decay of the second moment", low=0, below=1)
    eps: float = number(PER_TRIAL, 1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = number(PER_TRIAL, 1e-4, "decoupled weight decay of matrices, times the learning rate", low=0)
    clip: float | None = number(PER_TRIAL, None, "largest global gradient norm; null: no clipping", above=0)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then decay to `final` of the peak rate at the last step."""

    warmup: int | None = number(PER_TRIAL, None, "steps of linear warm-up; null: 5% of train.steps", low=0)
    decay: str = choice(PER_TRIAL, "cosine", "shape after warm-up", "cosine", "linear", "constant")
    final: float = number(PER_TRIAL, 0.0, "share of the peak rate at the end of the decay", low=0, high=1)


@dataclass(frozen=True)
class Train:
    """How long, on how much, in what precision."""

    steps: int = number(STRUCTURAL, 200, "optimizer steps", low=1)
    batch: int = number(STRUCTURAL, 8, "sequences in a batch", low=1)
    precision: str = choice(
        STRUCTURAL,
        "fp32",
        "format of matrix products; bf16 and fp16 keep float32 weights, and a CPU emulates them; fp64: reference runs",
        "fp32",
        "bf16",
        "fp16",
        "fp64",
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
    validate_every: int = number(STRUCTURAL, 50, "steps between validations; the last step always validates", low=1)
    validate_batches: int = number(STRUCTURAL, 2, "batches of one validation, the same for every trial", low=1)


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
PARTS: dict[str, type] = {"model": Model, "optim": Optim, "schedule": Schedule, "train": Train, "data": Data}


@dataclass(frozen=True)
class Trial:
    """One training run. Its id is a hash of everything below, so equal configurations are the same trial."""

    model: Model = Model()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    train: Train = Train()
    data: Data = Data()
    fault: Fault = NO_FAULT
    mitigation: str = "none"
    seed: int = number(PER_TRIAL, 0, "seed of everything that has no seed of its own", low=0, high=LARGEST_SEED)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as they are stored with the results."""
        parts = {name: vars(getattr(self, name)) for name in (*PARTS, "fault")}
        return {**{k: dict(v) for k, v in parts.items()}, "mitigation": self.mitigation, "seed": self.seed}

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
        """The structural fields: trials with equal structure can share a pack."""
        return tuple(
            getattr(values, name)
            for values, cls in ((getattr(self, part), cls) for part, cls in PARTS.items())
            for name in _structural(cls)
        )

    @property
    def seeds(self) -> dict[str, int]:
        """The three seeds in force: initial weights, data order, fault."""
        own = {"init": self.model.seed, "data": self.data.seed, "fault": self.fault.seed}
        return {name: self.seed if seed is None else seed for name, seed in own.items()}


def trial_from_dict(values: Mapping[str, Any], fault_types: Mapping[str, type[Fault]]) -> Trial:
    """The inverse of `Trial.to_dict`; `fault_types` maps a fault's kind to its dataclass."""
    parts = {name: cls(**values[name]) for name, cls in PARTS.items()}
    fault = fault_types[values["fault"]["kind"]](**values["fault"])
    return Trial(**parts, fault=fault, mitigation=values["mitigation"], seed=values["seed"])


# --- checking values against the schema --------------------------------------------------------------------------


@cache
def field_types(cls: type) -> dict[str, tuple[type, bool]]:
    """name -> (type, whether null is allowed) of a config dataclass."""
    found = {}
    for name, hint in get_type_hints(cls).items():
        if get_origin(hint) in (Union, UnionType):
            arguments = [a for a in get_args(hint) if a is not NoneType]
            found[name] = (arguments[0], True)
        else:
            found[name] = (hint, False)
    return found


@cache
def _metadata(cls: type) -> dict[str, Mapping[str, Any]]:
    return {f.name: f.metadata for f in dataclasses.fields(cls)}


@cache
def _structural(cls: type) -> tuple[str, ...]:
    return tuple(name for name, metadata in _metadata(cls).items() if metadata["scope"] == STRUCTURAL)


def _convert(value: Any, kind: type, optional: bool) -> Any:
    if value is None and optional:
        return None
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) + 0.0  # -0.0 is the same configuration as 0.0
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, str):
        return str(value)
    if type(value) is kind:
        return value
    raise TypeError


def _shown(value: Any) -> str:
    """As it stands on a command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def checked(key: str, cls: type, name: str, value: Any) -> Any:
    """`value` as field `name` of `cls` wants it.

    Raises ConfigError, naming `key`, for a value of the wrong type or outside what the field allows.
    """
    kind, optional = field_types(cls)[name]
    metadata = _metadata(cls)[name]
    if str(value) in metadata["choices"]:
        value = str(value)  # Hydra takes the word nan for a number
    null = " or null" if optional else ""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a word"}[kind]
    try:
        value = _convert(value, kind, optional)
    except (TypeError, OverflowError):
        allowed = f"{words}{null}" if kind is not str or not metadata["choices"] else metadata["allowed"]
        raise ConfigError(f"{key}={_shown(value)}: wrong type ({type(value).__name__}); allowed: {allowed}") from None
    if value is not None and not metadata["check"](value):
        raise ConfigError(f"{key}={value}: out of range; allowed: {metadata['allowed']}{null}")
    return value


def check_trial(trial: Trial) -> None:
    """Refuse combinations of values that are each fine alone.

    Raises ConfigError with every reason, a sentence each.
    """
    model, train, data, fault = trial.model, trial.train, trial.data, trial.fault
    reasons = []
    if model.width % model.head_dim:
        reasons.append(
            f"model.width={model.width}: not divisible by model.head_dim={model.head_dim}; allowed: a multiple of it"
        )
    if model.positions == "rotary" and model.head_dim % 2:
        reasons.append(f"model.head_dim={model.head_dim}: odd; allowed with model.positions=rotary: an even number")
    if trial.schedule.warmup is not None and trial.schedule.warmup > train.steps:
        reasons.append(
            f"schedule.warmup={trial.schedule.warmup}: longer than train.steps={train.steps}; "
            f"allowed: 0 to {train.steps}"
        )
    if train.batch % train.ranks:
        reasons.append(
            f"train.ranks={train.ranks}: does not divide train.batch={train.batch}; allowed: a divisor of it"
        )
    if train.loss_scaling == "dynamic" and train.loss_scale < SMALLEST_SCALE:
        reasons.append(
            f"train.loss_scale={train.loss_scale}: below {SMALLEST_SCALE}, where train.loss_scaling=dynamic gives up; "
            f"allowed: {SMALLEST_SCALE} to {LARGEST_SCALE}"
        )
    if train.loss_scaling == "none" and getattr(fault, "site", None) == "loss_scale":
        reasons.append(
            "fault.site=loss_scale: train.loss_scaling=none has no scale; "
            "allowed: another site, or train.loss_scaling=static or dynamic"
        )
    if fault != NO_FAULT and fault.start >= train.steps:
        reasons.append(
            f"fault.start={fault.start}: after the last step of train.steps={train.steps}; "
            f"allowed: 0 to {train.steps - 1}"
        )
    if data.source in ("text", "tokens") and not data.path:
        reasons.append(
            f"data.path={_shown(data.path)}: missing for data.source={data.source}; allowed: a file or a folder"
        )
    if data.source == "tokens" and data.tokenizer != "bytes":
        reasons.append(f"data.tokenizer={data.tokenizer}: data.source=tokens is tokenized already; allowed: bytes")
    if data.tokenizer == "bytes" and data.source in ("stdlib", "text") and data.vocabulary != 256:
        reasons.append(f"data.vocabulary={data.vocabulary}: data.tokenizer=bytes has 256 tokens; allowed: 256")
    if data.tokenizer == "bpe" and data.vocabulary < 257:
        reasons.append(f"data.vocabulary={data.vocabulary}: too small for data.tokenizer=bpe; allowed: 257 to 65536")
    if reasons:
        raise ConfigError(*reasons)
