"""The configuration of one trial.

It has the sections of the recipe (harness/config/model.py, recipe.py), a fault, a mitigation's name and a seed.

Optimizers, clippers and other parts that have hyperparameters of their own bring a section along (`sections`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from harness.basics import plugins
from harness.config.cadences import signals
from harness.config.curriculum import Curriculum, curriculum
from harness.config.data import Data
from harness.config.fields import PER_TRIAL, STRUCTURAL, anything, choice, names, number, seed, structure, text
from harness.config.ladder import canonical
from harness.config.limits import LARGEST_SEED
from harness.config.model import Model
from harness.config.recipe import Optim, Schedule, Screen, Train


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the model is trained for."""

    name: str = choice(
        STRUCTURAL, "next_token", "what a batch and a loss are", table="harness.objectives.table:OBJECTIVES"
    )


Objective = ObjectiveConfig  # the old name, in jobs that an earlier version has submitted to Slurm


@dataclass(frozen=True)
class Detect:
    """What watches the run; each detector's constants are in a section of their own, `detect.NAME`."""

    name: str = names(STRUCTURAL, "none", "detectors that watch", table="harness.detectors.table:DETECTORS")


@dataclass(frozen=True)
class Playbook:
    """What is done at an alarm; what an action needs to know is in a section of its own, `playbook.ACTION`."""

    name: str = anything(PER_TRIAL, "none", "the option `playbook=name` that was chosen")
    ladder: str = text(PER_TRIAL, "[]", "what is done at which alarm, and what next", convert=canonical)


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
    seed: int | None = seed("seed of whatever the fault draws; null: the trial's seed")


NO_FAULT = Fault()
IDENTITY = ("kind", "name")  # of a fault: not for the command line, which chooses them with `fault=name`
WITH_OPTIONS = ("branches", "optimizers", "clippers", "guards", "objectives")  # kinds of parts that may have a section
CORE: dict[str, type] = {"model": Model, "optim": Optim, "schedule": Schedule}
CORE |= {"train": Train, "screen": Screen, "data": Data}
YOUNGER = (
    *(
        ("model", "start"),
        ("data", "skip_bad"),
        ("data", "token_type"),
        ("train", "loss_scale_per"),
        ("optim", "beta2_exponent"),
        ("moe", "dense_first"),
        *(("policy", name) for name in ("sampler_apart", "reference_every")),
    ),
    *(
        ("model", name)
        for name in (
            "hypersphere",
            "smooth_swiglu",
            "dyt_alpha",
            "depth_scaled_norms",
            "value_norm",
            "attention_gate",
            "attention_sink",
        )
    ),
    *(("policy", name) for name in ("proxy", "proxy_noise")),
    *(("model", name) for name in ("residual_streams", "stream_mixing", "stream_gate")),
    *(("policy", name) for name in ("critic", "gamma", "gae", "value_loss", "value_clip", "minibatches", "mix_in")),
    *(("policy", name) for name in ("entropy_target", "entropy_step", "routing_replay")),
)
"""Fields that are younger than trials that are stored, whose ids stay what they are; so are all readings but these."""
OLD_READINGS = (
    *("adam_floor", "at_rest", "attention_entropy", "kurtosis", "layer_gradients", "layer_updates", "log_z"),
    *("moment_size", "qk_rank", "residual_gain", "token_rarity"),
)
MOST_TEXTS = 10_000  # sections whose text is kept


def default_of(section: str, field: str) -> Any:
    """The default of a field of a section that every trial has."""
    return getattr(_defaults()[section], field)


@cache
def sections() -> Mapping[str, type]:
    """Every section of a trial but its fault: those above, and those that optimizers, clippers, ... bring along.

    A module of a part (harness/basics/plugins.py) that defines a dataclass `Options` adds a section of its name, one of
    a detector `detect.NAME`, one of an action `playbook.NAME`, one of a reward `policy.NAME`.
    """
    modules = {name: module for kind in WITH_OPTIONS for name, module in plugins.modules(kind).items()}
    modules |= {f"detect.{name}": module for name, module in plugins.modules("detectors").items()}
    modules |= {f"playbook.{name}": module for name, module in plugins.modules("actions").items()}
    modules |= {f"policy.{name}": module for name, module in plugins.modules("rewards").items()}
    brought = {name: module.Options for name, module in modules.items() if hasattr(module, "Options")}
    ours = {"objective": ObjectiveConfig, "detect": Detect, "playbook": Playbook, "signals": signals()}
    return {**CORE, **ours, **brought}


@cache
def _defaults() -> Mapping[str, Any]:
    return {name: cls() for name, cls in sections().items()}


@cache
def _usual_structures() -> Mapping[str, tuple[Any, ...]]:
    return {name: structure(values) for name, values in _defaults().items()}


@cache
def younger(section: str) -> tuple[str, ...]:
    """The fields of a section that are left out of what is stored where they are at their defaults."""
    readings = [name for name in vars(_defaults()[section]) if name not in OLD_READINGS] if section == "signals" else []
    return (*(field for part, field in YOUNGER if part == section), *readings)


def _plain(name: str, values: Any) -> dict[str, Any]:
    """The fields of a section as they are stored; `younger` ones only where they are given."""
    fields = dict(vars(values))
    for field in younger(name) if name != "fault" else ():
        if fields[field] == default_of(name, field):
            del fields[field]
    return fields


_TEXTS: dict[tuple[str, int], tuple[Any, str]] = {}  # by identity: equal fields may be written otherwise, as 1 and 1.0


def _json(name: str, values: Any) -> str:
    """A section as text, with its name."""
    kept = _TEXTS.get((name, id(values)))
    if kept is None or kept[0] is not values:
        if len(_TEXTS) >= MOST_TEXTS:
            _TEXTS.clear()
        kept = values, f"{json.dumps(name)}: {json.dumps(_plain(name, values), sort_keys=True)}"
        if type(values).__dataclass_params__.frozen:
            _TEXTS[name, id(values)] = kept
    return kept[1]


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
    recipe: str = "plain"  # by name: what the mitigation is a difference to
    mitigation: str = "none"
    seed: int = number(PER_TRIAL, 0, "seed of everything that has no seed of its own", low=0, high=LARGEST_SEED)
    extras: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, Any], **others: Any) -> Trial:
        """The trial with these sections, by name; `others` are fault, recipe, mitigation and seed."""
        core = {name: values for name, values in parts.items() if name in CORE}
        extras = sorted((name, values) for name, values in parts.items() if name not in CORE)
        return cls(**core, **others, extras=tuple((k, v) for k, v in extras if v != _defaults()[k]))

    def section(self, name: str) -> Any:
        """One section by its name, also of those that optimizers and clippers bring along."""
        return getattr(self, name) if name in CORE else self._brought.get(name, _defaults()[name])

    @cached_property
    def _brought(self) -> Mapping[str, Any]:
        return dict(self.extras)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as they are stored with the results; `younger` fields only where they are given."""
        parts = {name: _plain(name, values) for name, values in self.parts.items()}
        return {**parts, "recipe": self.recipe, "mitigation": self.mitigation, "seed": self.seed}

    @property
    def parts(self) -> dict[str, Any]:
        """Its sections by name, the fault among them.

        A section that an optimizer, a clipper or the like brings along is left out where it is at its defaults.
        """
        return {**{name: getattr(self, name) for name in (*CORE, "fault")}, **self._brought}

    @cached_property
    def id(self) -> str:
        # As json.dumps(self.to_dict(), sort_keys=True) has it. Thousands of trials share their sections.
        texts = {name: _json(name, values) for name, values in self.parts.items()}
        texts |= {name: f'"{name}": {json.dumps(getattr(self, name))}' for name in ("recipe", "mitigation", "seed")}
        text = "{" + ", ".join(texts[name] for name in sorted(texts)) + "}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def golden(self) -> Trial:
        """The golden twin: the same trial without the fault."""
        return self if self.fault == NO_FAULT else dataclasses.replace(self, fault=NO_FAULT)

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What the trials of a pack have in common: trials with equal structure can share one."""
        own = {name: structure(values) for name, values in self.parts.items() if name != "fault"}
        return tuple({**_usual_structures(), **own}.items())

    @property
    def steps(self) -> int:
        """Optimizer steps of the run: more than train.steps where sequences or batches grow, for as many tokens."""
        if self.schedule.sequence_start is None and self.schedule.batch_start is None:
            return self.train.steps
        return self.curriculum.steps

    @property
    def curriculum(self) -> Curriculum:
        """The sizes of every step; all trials of one structure share them."""
        growth = self.schedule
        sequences = (self.train.batch, growth.batch_start, growth.batch_steps, self.train.parts)
        lengths = (self.model.context, growth.sequence_start, growth.sequence_steps, growth.sequence_mode == "reshape")
        return curriculum(self.train.steps, sequences, lengths)

    @property
    def objective(self) -> ObjectiveConfig:
        """What it is trained for: a section that is left out of the id where it is the usual one."""
        section: ObjectiveConfig = self.section("objective")
        return section

    @property
    def playbook(self) -> Playbook:
        """What is done at an alarm: a section that is left out of the id where that is nothing."""
        section: Playbook = self.section("playbook")
        return section

    @property
    def seeds(self) -> dict[str, int]:
        """The three seeds in force: initial weights, data order, fault."""
        seeds = {"init": self.model.seed, "data": self.data.seed, "fault": self.fault.seed}
        return {name: self.seed if seed is None else seed for name, seed in seeds.items()}


def trial_from_dict(values: Mapping[str, Any], fault_types: Mapping[str, type[Fault]]) -> Trial:
    """The inverse of `Trial.to_dict`; `fault_types` maps a fault's kind to its dataclass."""
    parts = {name: cls(**values[name]) for name, cls in sections().items() if name in values}
    fault = fault_types[values["fault"]["kind"]](**values["fault"])
    names = {name: values[name] for name in ("recipe", "mitigation") if name in values}
    return Trial.of(parts, fault=fault, **names, seed=values["seed"])
